"""How long states waited: seconds since a state was kept or last resumed from.

The clock is for people.  The tree's policy counts in its own logical time and never sees these.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from radix import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mempool import Grant, IdArray
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.capture import Capture

BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class Ages:
    """A histogram: `counts[i]` ages in (BOUNDS_S[i-1], BOUNDS_S[i]], the last of them longer."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0
        self.exported: Callable[[float], object] | None = None  # told of every age as well

    def observe(self, age_s: float) -> None:
        """Count one age."""
        self.counts[bisect_left(BOUNDS_S, age_s)] += 1
        self.total_s += age_s
        if self.exported is not None:
            self.exported(age_s)

    def as_dict(self) -> dict[str, object]:
        """For JSON: bounds in seconds, counts between them, the sum of ages."""
        return {"bounds_s": list(BOUNDS_S), "counts": list(self.counts), "total_s": self.total_s}


class AgingPool:
    """The arena as the tree sees it (`radix.PoolPort`); knows when each state was last useful.

    The tree frees a state through its pool only when it evicts it, so that is where eviction ages
    are taken.  Extra states that nobody used have none: they come and go in spare memory or their
    small share, and their ages would say that memory is short.
    """

    def __init__(self, arena: Arena, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        slots = len(arena.pool.states.indices)
        self._used = [0.0] * slots  # seconds, by state id
        self._extra = [False] * slots  # left in spare memory, and not used yet
        self._free, self._alloc = arena.free, arena.alloc
        self.fits, self.fits_after = arena.fits, arena.fits_after
        self.hit, self.eviction = Ages(), Ages()

    def alloc(self, states: int, blocks: int) -> Grant | None:
        """All or nothing."""
        return self._alloc(states, blocks)

    def free(self, states: IdArray, blocks: IdArray) -> None:
        """The tree evicted these states, or let go of these blocks."""
        if states.size:
            now = self._clock()
            for slot in states.tolist():
                if not self._extra[slot]:
                    self.eviction.observe(now - self._used[slot])
        self._free(states, blocks)

    def kept(self, captures: Iterable[Capture]) -> None:
        """The tree took these states."""
        now = self._clock()
        for capture in captures:
            self._used[capture.slot] = now
            self._extra[capture.slot] = capture.kind is Kind.OPPORTUNISTIC

    def resumed(self, slot: int, *, counted: bool) -> None:
        """A request resumed from this state."""
        now = self._clock()
        if counted:
            self.hit.observe(now - self._used[slot])
        self._used[slot] = now
        self._extra[slot] = False
