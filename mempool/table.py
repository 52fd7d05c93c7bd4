"""Virtual ids of one side and where each lives; the only thing a move rewrites."""

from typing import Final

import numpy as np
import numpy.typing as npt

from mempool.ids import IdArray, as_ids

# What an id is; the pool knows no more (private and cached ids are both live).
FREE: Final = 0
LIVE: Final = 1
RETIRED: Final = 2
SINK: Final = 3
STATUS_NAMES: Final = ("free", "live", "retired", "sink")


class Table:
    """Ids `1..max_id` of one side, bound to physical indices.

    Freed ids queue up behind all free ones (FIFO), so a stale id stays free, and is caught, for as
    long as possible. As many ids exist as positions, so ids never run out before bytes do.

    Attributes:
        indices: int64 `[max_id + 1]`, physical index by id; 0 (the sink) where unbound. The same
            array for the table's whole life: a tensor may share its memory.
        max_id: the highest id ever handed out.

    >>> table = Table(3, 10)
    >>> table.bind(np.array([9, 8])).tolist(), table.index_of(np.array([2, -1, 0])).tolist()
    ([1, 2], [8, 0, 0])
    """

    __slots__ = (
        "_head",
        "_ids",
        "_queue",
        "_scratch",
        "_status",
        "_status_bytes",
        "free_count",
        "indices",
        "max_id",
    )

    def __init__(self, max_id: int, max_index: int) -> None:
        self.max_id = max_id
        self.indices: IdArray = np.zeros(max_id + 1, dtype=np.int64)
        self._ids: IdArray = np.zeros(max_index + 1, dtype=np.int64)  # id by physical index
        self._status_bytes = bytearray(max_id + 1)  # scalar reads here, arrays through the view
        self._status: npt.NDArray[np.uint8] = np.frombuffer(self._status_bytes, dtype=np.uint8)
        self._scratch: IdArray = np.zeros(max_id + 1, dtype=np.int64)
        self._queue: IdArray = np.empty(max_id, dtype=np.int64)  # ring of free ids
        self.clear()

    def clear(self) -> None:
        """Unbind every id, in place."""
        self.indices[:] = 0
        self._ids[:] = 0
        self._status[:] = FREE
        self._status[0] = SINK
        self._queue[:] = np.arange(1, self.max_id + 1)
        self._head = 0
        self.free_count = self.max_id

    def index_of(self, ids: npt.ArrayLike) -> IdArray:
        """Physical indices of `ids`, any shape; padding (negative) and unbound ids give the sink.

        Raises:
            IndexError: an id above `max_id`.
        """
        index: IdArray = self.indices[np.maximum(np.asarray(ids, dtype=np.int64), 0)]
        return index

    def id_at(self, indices: IdArray) -> IdArray:
        """Ids bound to physical indices, 0 where none is."""
        return self._ids[indices]

    def bind(self, indices: IdArray) -> IdArray:
        """Take as many free ids, oldest first, and bind them to `indices` in order."""
        count = len(indices)
        assert count <= self.free_count, f"{count} ids of {self.free_count} free"
        stop = self._head + count
        if stop <= self.max_id:
            ids = self._queue[self._head : stop].copy()
        else:
            ids = np.concatenate((self._queue[self._head :], self._queue[: stop - self.max_id]))
        self._head = stop % self.max_id
        self.free_count -= count
        self.indices[ids] = indices
        self._ids[indices] = ids
        self._status[ids] = LIVE
        return ids

    def unbind(self, ids: IdArray) -> None:
        """Return checked ids to the back of the queue."""
        count = len(ids)
        if not count:
            return
        self._ids[self.indices[ids]] = 0
        self.indices[ids] = 0
        self._status[ids] = FREE
        start = (self._head + self.free_count) % self.max_id
        first = min(count, self.max_id - start)
        self._queue[start : start + first] = ids[:first]
        self._queue[: count - first] = ids[first:]
        self.free_count += count

    def rebind(self, sources: IdArray, targets: IdArray) -> None:
        """Let the ids bound to `sources` follow their bytes to the unbound `targets`."""
        ids = self._ids[sources]
        self._ids[sources] = 0
        self._ids[targets] = ids
        self.indices[ids] = targets

    def set_status(self, ids: IdArray, status: int) -> None:
        """Mark bound ids `LIVE` or `RETIRED`."""
        self._status[ids] = status

    def check_live(self, ids: npt.ArrayLike, verb: str) -> IdArray:
        """Return `ids` as int64 if each is live and named once.

        Raises:
            ValueError: naming the first offending id; nothing changed.
        """
        array = as_ids(ids)
        count = len(array)
        if count == 1:
            only = int(array[0])
            if 0 < only <= self.max_id and self._status_bytes[only] == LIVE:
                return array
        elif count == 0:
            return array
        elif array.min() > 0 and array.max() <= self.max_id:
            self._scratch[array] = order = np.arange(count, dtype=np.int64)
            once = bool((self._scratch[array] == order).all())
            if once and bool((self._status[array] == LIVE).all()):
                return array
        raise ValueError(self._complaint(array, verb))

    def _complaint(self, ids: IdArray, verb: str) -> str:
        seen: dict[int, bool] = {}
        for one in ids.tolist():
            if not 0 < one <= self.max_id:
                return f"{verb}: id {one} is foreign, ids run from 1 to {self.max_id}"
            if one in seen:
                return f"{verb}: id {one} is named twice in one call"
            if self._status[one] != LIVE:
                return f"{verb}: id {one} is {STATUS_NAMES[self._status[one]]}, not live"
            seen[one] = True
        raise AssertionError(f"{verb}: every id is live")

    def violations(self) -> list[str]:
        """Recount P4: ids and indices point at each other, each id is in exactly one place."""
        bound = np.flatnonzero(self.indices)
        held = np.flatnonzero(self._ids)
        queue = self._queue[(self._head + np.arange(self.free_count)) % self.max_id]
        status = self._status[1:]
        tenant = (status == LIVE) | (status == RETIRED)
        unique = np.unique(queue)
        checks = (
            (len(bound) == len(held), f"P4: {len(bound)} ids bound, {len(held)} indices held"),
            (bool((self._ids[self.indices[bound]] == bound).all()), "P4: id and index disagree"),
            (
                np.array_equal(np.flatnonzero(tenant) + 1, bound),
                "P4: bound ids are not the tenants",
            ),
            (len(unique) == len(queue), "P4: an id is queued twice"),
            (
                np.array_equal(unique, np.flatnonzero(status == FREE) + 1),
                "P4: the queue is not the set of free ids",
            ),
            (self.indices[0] == 0 and self._status[0] == SINK, "P4: the sink id is bound"),
        )
        return [text for good, text in checks if not good]
