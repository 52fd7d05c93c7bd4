"""What a pool holds, in bytes and units, and which of its invariants do not hold."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.ids import Side

if TYPE_CHECKING:
    from mempool.pool import Pool


@dataclass(frozen=True, slots=True)
class SideReport:
    """One side in units (states or blocks) and bytes; live + retired + holes = frontier."""

    live: int
    retired: int
    holes: int
    pinned: int
    frontier: int
    peak: int
    fundable: int
    live_bytes: int
    retired_bytes: int
    hole_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class Counters:
    """Monotone counts since construction; what a `clear` forgot counts as freed."""

    grants: int = 0
    refusals: int = 0
    states_granted: int = 0
    blocks_granted: int = 0
    states_freed: int = 0
    blocks_freed: int = 0
    moves: int = 0
    moved_bytes: int = 0
    stale_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A pool's bytes: live + retired + hole of both sides + gap + sink + slack = total.

    `slack_bytes` is what alignment costs: above the topmost block index and between the sink and
    the first state or block, each less than one unit.
    """

    total_bytes: int
    sink_bytes: int
    slack_bytes: int
    gap_bytes: int
    states: SideReport
    blocks: SideReport
    counters: Counters

    @property
    def free_bytes(self) -> int:
        """Gap and holes together."""
        return self.gap_bytes + self.states.hole_bytes + self.blocks.hole_bytes


def violations(pool: "Pool") -> list[str]:
    """Every invariant of mempool/README.md that does not hold, recomputed from scratch."""
    geometry = pool.geometry
    found = []
    for side in Side:
        end, table = pool.end_of(side), pool.table_of(side)
        live = end.index_of(end.live_from(0))
        texts = end.violations() + table.violations()
        bound = np.sort(table.indices[table.indices > 0])
        if not np.array_equal(bound, np.sort(live)):
            texts.append("P4: live units are not the bound indices")
        elif not np.array_equal(table.index_of(table.id_at(live)), live):
            texts.append("P4: a live unit's id points elsewhere")
        found += [f"{side.value}s: {text}" for text in texts]
    low = geometry.state_end(pool.end_of(Side.STATE).frontier)
    high = geometry.block_start(pool.end_of(Side.BLOCK).frontier)
    mark_low, mark_high = pool.owner_marks
    if not low <= mark_low <= mark_high <= high:
        found.append(f"P6: owner marks {mark_low}, {mark_high} leave the gap [{low}, {high})")
    report = pool.report()
    parts = report.free_bytes + report.sink_bytes + report.slack_bytes
    parts += sum(s.live_bytes + s.retired_bytes for s in (report.states, report.blocks))
    if parts != geometry.total_bytes or report.gap_bytes < 0:
        found.append(f"P1: gap {report.gap_bytes}, all parts {parts} of {geometry.total_bytes}")
    return found
