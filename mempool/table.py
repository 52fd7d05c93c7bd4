"""Virtual ids of one side and where each lives; the only thing a move rewrites."""

from typing import Final

import numpy as np
import numpy.typing as npt

from mempool.ids import SOME, IdArray

_SPARSE: Final = 32  # ids per named one beyond which a sort is faster than a count of marks


class Table:
    """Ids `1..max_id` of one side and the physical index each belongs to, a permutation.

    An index keeps its id until a move: then the two ids change places. So what a device copy of the
    table says stays right whatever is taken and freed, and only moves have to tell it.

    Args:
        max_id: number of ids, as many as positions: ids never run out before bytes do.
        origin: physical index of id 1.
        stride: 1 where indices grow with the id, -1 where they fall.

    Attributes:
        indices: int64 `[max_id + 1]`, physical index by id; 0 (the sink) where unbound.
        homes: int64 `[max_id + 1]`, the same with the index an unbound id belongs to. The same
            array for the table's whole life: a tensor may share its memory.
        max_id: the highest id ever handed out.

    >>> table = Table(3, origin=9, stride=-1)
    >>> table.bind(np.array([9, 8])).tolist(), table.index_of(np.array([2, -1, 0, 3])).tolist()
    ([1, 2], [8, 0, 0, 0])
    """

    __slots__ = ("_ids", "_marks", "homes", "indices", "max_id")

    def __init__(self, max_id: int, *, origin: int, stride: int = 1) -> None:
        self.max_id = max_id
        self.indices: IdArray = np.zeros(max_id + 1, dtype=np.int64)
        self.homes: IdArray = origin + stride * np.arange(-1, max_id, dtype=np.int64)
        self.homes[0] = 0
        self._ids: IdArray = np.zeros(int(self.homes.max()) + 1, dtype=np.int64)  # by index
        self._ids[self.homes[1:]] = np.arange(1, max_id + 1)
        self._marks = np.zeros(max_id + 1, dtype=np.bool_)  # all clear between calls

    def clear(self) -> None:
        """Unbind every id, in place; each keeps its index."""
        self.indices[:] = 0

    def index_of(self, ids: npt.ArrayLike) -> IdArray:
        """Physical indices of `ids`, any shape; padding (negative) and unbound ids give the sink.

        Raises:
            IndexError: an id above `max_id`.
        """
        index: IdArray = self.indices[np.maximum(np.asarray(ids, dtype=np.int64), 0)]
        return index

    def id_at(self, indices: IdArray) -> IdArray:
        """Ids that physical indices belong to."""
        return self._ids[indices]

    def bind(self, indices: IdArray) -> IdArray:
        """The ids of free `indices`, bound from now on."""
        ids = self._ids[indices]
        self.indices[ids] = indices
        return ids

    def unbind(self, ids: IdArray) -> None:
        """Take resolved ids back."""
        self.indices[ids] = 0

    def rebind(self, sources: IdArray, targets: IdArray) -> None:
        """Let the ids bound to `sources` follow their bytes to the unbound `targets`.

        The targets' ids take the sources' place.
        """
        moved, displaced = self._ids[sources], self._ids[targets]
        self._ids[targets], self._ids[sources] = moved, displaced
        self.homes[moved], self.homes[displaced] = targets, sources
        self.indices[moved] = targets

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
        else:
            low, high = int(ids.min()), int(ids.max())
            if low > 0 and high <= self.max_id:
                found = self.indices[ids]
                if found.all() and self._distinct(ids, low, high):
                    return found
        raise ValueError(self._complaint(ids, verb))

    def _distinct(self, ids: IdArray, low: int, high: int) -> bool:
        """Whether no id is named twice; all lie in [low, high]."""
        if high - low > _SPARSE * len(ids):
            ordered = np.sort(ids)
            return bool((ordered[1:] > ordered[:-1]).all())
        self._marks[ids] = True
        count = np.count_nonzero(self._marks[low : high + 1])
        self._marks[ids] = False
        return bool(count == len(ids))

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
        """Recount P4: ids and indices are one permutation, and a bound id is where it belongs."""
        ids = np.arange(1, self.max_id + 1)
        bound = self.indices != 0
        checks = (
            (np.array_equal(self._ids[self.homes[1:]], ids), "P4: id and index disagree"),
            (
                np.array_equal(self.indices[bound], self.homes[bound]),
                "P4: an id is bound to another's index",
            ),
            (int(self.indices[0]) == 0 == int(self.homes[0]), "P4: the sink id is bound"),
        )
        return [text for good, text in checks if not good]
