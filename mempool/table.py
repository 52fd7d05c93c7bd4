"""Virtual ids of one side and where each lives; the only thing a move rewrites."""

import numpy as np
import numpy.typing as npt

from mempool.ids import SOME, IdArray


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
        "free_count",
        "indices",
        "max_id",
    )

    def __init__(self, max_id: int, max_index: int) -> None:
        self.max_id = max_id
        self.indices: IdArray = np.zeros(max_id + 1, dtype=np.int64)
        self._ids: IdArray = np.zeros(max_index + 1, dtype=np.int64)  # id by physical index
        self._scratch: IdArray = np.zeros(max_id + 1, dtype=np.int64)
        self._queue: IdArray = np.empty(max_id, dtype=np.int64)  # ring of free ids
        self.clear()

    def clear(self) -> None:
        """Unbind every id, in place."""
        self.indices[:] = 0
        self._ids[:] = 0
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
        """Ids last bound to physical indices; theirs now where a unit is live."""
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
        return ids

    def unbind(self, ids: IdArray) -> None:
        """Return resolved ids to the back of the queue."""
        count = len(ids)
        self.indices[ids] = 0
        start = (self._head + self.free_count) % self.max_id
        stop = start + count
        if stop <= self.max_id:
            self._queue[start:stop] = ids
        else:
            self._queue[start:] = ids[: self.max_id - start]
            self._queue[: stop - self.max_id] = ids[self.max_id - start :]
        self.free_count += count

    def rebind(self, sources: IdArray, targets: IdArray) -> None:
        """Let the ids bound to `sources` follow their bytes to the unbound `targets`."""
        ids = self._ids[sources]
        self._ids[targets] = ids
        self.indices[ids] = targets

    def resolve(self, ids: IdArray, verb: str) -> IdArray:
        """Indices of `ids`, at least one, if each is bound and named once.

        Raises:
            ValueError: naming `verb` and the first offending id; nothing changed.
        """
        count = len(ids)
        if count == 1:
            if 0 < ids[0] <= self.max_id and self.indices[ids[0]]:
                return self.indices[ids]
        elif count <= SOME:
            given = ids.tolist()
            if min(given) > 0 and max(given) <= self.max_id and len({*given}) == count:
                found = self.indices[ids]
                if 0 not in found.tolist():
                    return found
        elif ids.min() > 0 and ids.max() <= self.max_id:
            self._scratch[ids] = order = np.arange(count, dtype=np.int64)
            found = self.indices[ids]
            if bool((self._scratch[ids] == order).all()) and bool(found.all()):
                return found
        raise ValueError(self._complaint(ids, verb))

    def _complaint(self, ids: IdArray, verb: str) -> str:
        seen: dict[int, bool] = {}
        for one in ids.tolist():
            if not 0 < one <= self.max_id:
                return f"{verb}: id {one} is foreign, ids run from 1 to {self.max_id}"
            if one in seen:
                return f"{verb}: id {one} is named twice in one call"
            if not self.indices[one]:
                return f"{verb}: id {one} is free"
            seen[one] = True
        raise AssertionError(f"{verb}: every id is bound")

    def violations(self) -> list[str]:
        """Recount P4: ids and indices point at each other, each id is in exactly one place."""
        bound = np.flatnonzero(self.indices)
        queue = self._queue[(self._head + np.arange(self.free_count)) % self.max_id]
        checks = (
            (bool((self._ids[self.indices[bound]] == bound).all()), "P4: id and index disagree"),
            (
                np.array_equal(np.sort(queue), np.flatnonzero(self.indices[1:] == 0) + 1),
                "P4: the queue is not the set of free ids",
            ),
            (int(self.indices[0]) == 0, "P4: the sink id is bound"),
        )
        return [text for good, text in checks if not good]
