"""One end of the arena: which positions are live, which are fixed, and where the frontier stands.

A position is live or, below the frontier, a hole; the frontier is one past the topmost live
position. A fixed position (pinned or retired) is live and must not be moved.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from mempool.ids import EMPTY, FEW, SOME, IdArray

_SCAN: Final = 4096  # positions looked at in the first step when many holes are collected,
_SCAN_MOST: Final = 1 << 17  # and, where few are found, at most: it stays in the L2 cache


class End:
    """Live positions of one side, taken nearest its own end.

    Units come and go by physical index; only plans (compaction.py) speak of positions.

    Args:
        capacity: number of positions.
        origin: physical index of position 0.
        stride: 1 where indices grow with the position, -1 where they fall.

    Attributes:
        live: number of live positions, retired ones included.
        frontier: one past the topmost live position (P2).
        fixed_end: one past the topmost fixed position; no plan lowers the frontier below it.
        fixed: number of fixed positions.
        peak: highest `live` since construction.

    >>> end = End(8, origin=7, stride=-1)
    >>> end.take(3).tolist()
    [7, 6, 5]
    >>> end.give(np.array([6])); end.take(2).tolist(), end.frontier
    ([6, 4], 4)
    """

    __slots__ = (
        "_bytes",
        "_first_hole",
        "_fixed",
        "_live",
        "capacity",
        "fixed",
        "fixed_end",
        "frontier",
        "live",
        "origin",
        "peak",
        "stride",
    )

    def __init__(self, capacity: int, *, origin: int = 0, stride: int = 1) -> None:
        self.capacity = capacity
        self.origin = origin
        self.stride = stride
        self.peak = 0
        self._bytes = bytearray(capacity)  # its find / rfind are memchr, the array view gathers
        self._live: npt.NDArray[np.uint8] = np.frombuffer(self._bytes, dtype=np.uint8)
        self._fixed = np.zeros(capacity, dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Make every position a free one, in place."""
        self.live = self.frontier = self.fixed = self.fixed_end = 0
        self._first_hole = 0  # every position below it is live
        self._live[:] = 0
        self._fixed[:] = 0

    def index_of(self, positions: IdArray) -> IdArray:
        """Physical indices of positions."""
        return positions + self.origin if self.stride == 1 else self.origin - positions

    def position_of(self, indices: IdArray) -> IdArray:
        """Positions of physical indices."""
        return indices - self.origin if self.stride == 1 else self.origin - indices

    @property
    def holes(self) -> int:
        """Positions below the frontier that are not live."""
        return self.frontier - self.live

    @property
    def packed(self) -> int:
        """The lowest frontier that compaction can reach now."""
        return max(self.live, self.fixed_end)

    def take(self, count: int) -> IdArray:
        """Make the `count` free positions nearest the own end live; their indices, in order."""
        if count == 0:
            return EMPTY
        assert self.live + count <= self.capacity, f"{count} more of {self.capacity}"
        if self.live == self.frontier:
            indices = self._extend(count)
        elif count <= FEW:
            indices = np.array([self._take_one() for _ in range(count)], dtype=np.int64)
        else:
            indices = self._fill(count)
        self.live += count
        self.peak = max(self.peak, self.live)
        return indices

    def _extend(self, count: int) -> IdArray:
        start, stop = self.frontier, self.frontier + count
        self._live[start:stop] = 1
        self.frontier = self._first_hole = stop
        origin, stride = self.origin, self.stride
        return np.arange(origin + stride * start, origin + stride * stop, stride, np.int64)

    def _take_one(self) -> int:
        position = self._bytes.find(0, self._first_hole)
        self._bytes[position] = 1
        self._first_hole = position + 1
        if position >= self.frontier:
            self.frontier = position + 1
        return self.origin + self.stride * position

    def _fill(self, count: int) -> IdArray:
        positions = self.find_holes(min(count, self.holes))
        self._live[positions] = 1
        self._first_hole = int(positions[-1]) + 1
        indices = self.index_of(positions)
        if count == len(positions):
            return indices
        return np.concatenate((indices, self._extend(count - len(positions))))

    def give(self, indices: IdArray) -> None:
        """Make live positions free and let the frontier retreat; indices must be distinct."""
        if len(indices) <= FEW:
            for index in indices.tolist():
                position = (index - self.origin) * self.stride
                self._bytes[position] = 0
                self._first_hole = min(self._first_hole, position)
        else:
            positions = self.position_of(indices)
            self._live[positions] = 0
            lowest = positions.min() if len(indices) > SOME else min(positions.tolist())
            self._first_hole = min(self._first_hole, int(lowest))
        self.live -= len(indices)
        if not self._bytes[self.frontier - 1]:
            self.frontier = self._bytes.rfind(1, 0, self.frontier) + 1

    def find_holes(self, count: int) -> IdArray:
        """The `count` holes nearest the own end, ascending; there must be as many."""
        assert count <= self.holes, f"{count} holes asked, {self.holes} known"
        if count == 0:
            return EMPTY
        found: list[IdArray] = []
        low, step = self._first_hole, max(_SCAN, 2 * count)
        while count > 0:
            high = min(low + step, self.frontier)
            part = np.flatnonzero(self._live[low:high] == 0)[:count] + low
            found.append(part)
            count -= len(part)
            low, step = high, max(step, min(2 * step, _SCAN_MOST))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def upcoming(self, count: int) -> IdArray:
        """Indices that the next `take`s make live, in order: at most `count`, found at one look."""
        low = self._first_hole
        found = np.flatnonzero(self._live[low : low + max(_SCAN, 2 * count)] == 0)
        return self.index_of(found[:count] + low)

    def live_from(self, position: int) -> IdArray:
        """Live positions at or above `position`, ascending."""
        return np.flatnonzero(self._live[position : self.frontier]) + position

    def move(self, sources: IdArray, targets: IdArray) -> None:
        """Free `sources`, make the holes `targets` live and lower the frontier."""
        self._live[targets] = 1
        self._live[sources] = 0
        # Plans fill the deepest holes, so what lies below the last target is live.
        self._first_hole = int(targets[-1]) + 1
        self.frontier = self._bytes.rfind(1, 0, self.frontier) + 1

    def fix(self, indices: IdArray) -> None:
        """Forbid moves of live units; counted, so two reasons may hold one unit."""
        if len(indices):
            positions = self.position_of(indices)
            self._fixed[positions] += 1
            self.fixed += int(np.count_nonzero(self._fixed[positions] == 1))
            self.fixed_end = max(self.fixed_end, int(positions.max()) + 1)

    def loosen(self, indices: IdArray) -> None:
        """Take back one `fix` of each unit."""
        if len(indices):
            positions = self.position_of(indices)
            self._fixed[positions] -= 1
            self.fixed -= int(np.count_nonzero(self._fixed[positions] == 0))
            self._retreat_fixed()

    def is_fixed(self, indices: IdArray) -> npt.NDArray[np.bool_]:
        """Which of the units are fixed."""
        fixed: npt.NDArray[np.bool_] = self._fixed[self.position_of(indices)] > 0
        return fixed

    def is_live(self, positions: IdArray) -> npt.NDArray[np.bool_]:
        """Which of the positions are live."""
        live: npt.NDArray[np.bool_] = self._live[positions] == 1
        return live

    def _retreat_fixed(self) -> None:
        high = self.fixed_end
        while high > 0:
            low = max(high - _SCAN, 0)
            found = np.flatnonzero(self._fixed[low:high])
            if len(found):
                self.fixed_end = low + int(found[-1]) + 1
                return
            high = low
        self.fixed_end = 0

    def violations(self) -> list[str]:
        """Recount P2 (counts, frontier), P3 (fixed is live) and the scan hint."""
        live = np.flatnonzero(self._live)
        fixed = np.flatnonzero(self._fixed)
        top = int(live[-1]) + 1 if len(live) else 0
        fixed_top = int(fixed[-1]) + 1 if len(fixed) else 0
        checks = (
            (len(live) == self.live, f"P2: {self.live} live counted, {len(live)} found"),
            (top == self.frontier, f"P2: frontier {self.frontier}, topmost live ends at {top}"),
            (int(self._fixed.min(initial=0)) == 0, "P3: a position is loosened more than fixed"),
            (bool(self._live[fixed].all()), "P3: a fixed position is not live"),
            (len(fixed) == self.fixed, f"P3: {self.fixed} fixed counted, {len(fixed)} found"),
            (fixed_top == self.fixed_end, f"P3: fixed end {self.fixed_end}, found {fixed_top}"),
            (bool(self._live[: self._first_hole].all()), "P2: a hole lies below the scan hint"),
        )
        return [text for good, text in checks if not good]
