"""Plans of moves for one end; pure, nothing changes until the pool applies them.

A plan moves the topmost live positions into the deepest holes, so the frontier retreats in every
plan (P7) and no position is both a source and a target. Fixed positions are never sources.
"""

from dataclasses import dataclass

import numpy as np

from mempool.end import End
from mempool.ids import EMPTY, IdArray


@dataclass(frozen=True, slots=True)
class Plan:
    """Positions to move, pairwise, both ascending."""

    sources: IdArray
    targets: IdArray

    def __len__(self) -> int:
        return len(self.sources)


def plan_frontier(end: End, frontier: int) -> Plan:
    """Fewest moves that lower the frontier to at most `frontier`; O(positions above it).

    The caller asks for no less than `end.packed`.
    """
    assert frontier >= end.packed, f"frontier {frontier} below the reachable {end.packed}"
    sources = end.live_from(frontier)
    return Plan(sources, end.find_holes(len(sources)))


def plan_budget(end: End, units: int) -> Plan:
    """At most `units` moves, each of which lowers the frontier; O(1) where there is no hole."""
    units = min(units, end.holes)
    if not units:  # an idle server asks in every turn of its loop
        return Plan(EMPTY, EMPTY)
    sources = end.live_from(end.fixed_end)[::-1][:units]
    targets = end.find_holes(len(sources))
    # The k-th topmost live position moves into the k-th deepest hole while it lies above it.
    count = int(np.count_nonzero(sources > targets))
    return Plan(sources[:count][::-1], targets[:count])
