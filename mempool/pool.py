"""The pool: two ends of one arena, joint fits, all-or-nothing alloc, ids that survive moves."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mempool.compaction import Plan, plan_budget, plan_frontier
from mempool.end import End
from mempool.geometry import Geometry
from mempool.ids import EMPTY, IdArray, Side, Step
from mempool.report import Counters, Report, SideReport, violations
from mempool.table import Table

# One side of a call: its end, its table, the ids named and their physical indices.
_Part = tuple[End, Table, IdArray, IdArray]
_Parts = tuple[_Part, _Part]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the units at `sources` to `targets`, pairwise physical indices of one side.

    The two are disjoint. Moves apply in the order given, on the forward stream, before the forward
    that reads them; the id table already names the targets.
    """

    side: Side
    sources: IdArray
    targets: IdArray


@dataclass(frozen=True, slots=True)
class Grant:
    """Ids handed out, and what the executor must do before a kernel reads them, in this order.

    `moves` first, then zero the units `stale_states` and `stale_blocks`: physical indices among
    the granted ones whose bytes last belonged to the other end.
    """

    states: IdArray
    blocks: IdArray
    moves: tuple[Move, ...]
    stale_states: IdArray
    stale_blocks: IdArray


class Pool:
    """States from the low end, blocks from the high end, one gap between; no static split.

    Deterministic: equal calls give equal answers in every process. Nothing here knows a tensor,
    so nothing waits on a device.

    >>> pool = Pool(Geometry(total_bytes=130, state_bytes=30, block_bytes=10, block_size=1))
    >>> pool.fits(1, 7), pool.fits(1, 8)
    (True, False)
    >>> grant = pool.alloc(1, 3)
    >>> grant.states.tolist(), grant.blocks.tolist(), pool.fundable_blocks()
    ([1], [1, 2, 3], 4)
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.states = Table(geometry.max_states, geometry.state_first + geometry.max_states - 1)
        self.blocks = Table(geometry.max_blocks, geometry.block_last)
        self._states = End(geometry.max_states, origin=geometry.state_first)
        self._blocks = End(geometry.max_blocks, origin=geometry.block_last, stride=-1)
        self._retired: deque[tuple[Step, IdArray, IdArray]] = deque()
        self._retired_states = self._retired_blocks = 0
        self._counters = Counters()
        # Bytes below the first mark last belonged to states, above the second to blocks, between
        # to nobody: every owner change is a frontier passing the other side's mark (P6).
        self._marks = (geometry.sink_bytes, geometry.total_bytes)

    # What fits

    @property
    def live_states(self) -> int:
        """States handed out and neither freed nor retired."""
        return self._states.live - self._retired_states

    @property
    def live_blocks(self) -> int:
        """Blocks handed out and neither freed nor retired."""
        return self._blocks.live - self._retired_blocks

    @property
    def retired_states(self) -> int:
        """States that wait for their step to drain."""
        return self._retired_states

    @property
    def retired_blocks(self) -> int:
        """Blocks that wait for their step to drain."""
        return self._retired_blocks

    @property
    def owner_marks(self) -> tuple[int, int]:
        """The two bytes between which nobody has owned anything yet."""
        return self._marks

    def fits(self, states: int, blocks: int) -> bool:
        """Whether `alloc(states, blocks)` succeeds now, moves included; O(1)."""
        return self.fits_after(states, blocks, freed_states=0, freed_blocks=0)

    def fits_after(self, states: int, blocks: int, *, freed_states: int, freed_blocks: int) -> bool:
        """Whether it would succeed once so many unpinned live units were freed; O(1)."""
        low = max(self._states.live + states - freed_states, self._states.fixed_end)
        high = max(self._blocks.live + blocks - freed_blocks, self._blocks.fixed_end)
        return self.geometry.state_end(low) <= self.geometry.block_start(high)

    def fundable_states(self) -> int:
        """How many states alone fit now."""
        top = self.geometry.block_start(self._blocks.packed)
        return self.geometry.states_below(top) - self._states.live

    def fundable_blocks(self) -> int:
        """How many blocks alone fit now."""
        bottom = self.geometry.state_end(self._states.packed)
        return self.geometry.blocks_above(bottom) - self._blocks.live

    # Take and return

    def alloc(self, states: int, blocks: int) -> Grant | None:
        """Take units of both kinds at once, nearest their own ends.

        O(units) plus, when the gap alone does not do, the fewest moves of the one side that still
        has holes.

        Returns:
            None when it does not fit; nothing changed then except the count of refusals.

        Raises:
            ValueError: a negative count.
        """
        if states < 0 or blocks < 0:
            raise ValueError(f"cannot take {states} states and {blocks} blocks")
        if not self.fits(states, blocks):
            self._counters.refusals += 1
            return None
        moves = self._make_room(states, blocks)
        state_indices, block_indices = self._states.take(states), self._blocks.take(blocks)
        stale_states, stale_blocks = self._cross_marks(state_indices, block_indices)
        self._counters.grants += 1
        self._counters.states_granted += states
        self._counters.blocks_granted += blocks
        return Grant(
            states=self.states.bind(state_indices) if states else EMPTY,
            blocks=self.blocks.bind(block_indices) if blocks else EMPTY,
            moves=moves,
            stale_states=stale_states,
            stale_blocks=stale_blocks,
        )

    def free(self, states: npt.ArrayLike, blocks: npt.ArrayLike) -> None:
        """Return live units at once; only what no forward in flight may still touch.

        Raises:
            ValueError: an id is free, retired, pinned, foreign, or named twice; nothing changed.
        """
        for end, table, ids, indices in self._droppable(states, blocks, "free"):
            self._release(end, table, ids, indices)

    def retire(self, states: npt.ArrayLike, blocks: npt.ArrayLike, step: Step) -> None:
        """Let go of live units that forward `step` may still touch; `drain(step)` frees them.

        Until then they keep their bytes and are not moved.

        Raises:
            ValueError: as `free`, or `step` is lower than one retired before; nothing changed.
        """
        if self._retired and step < self._retired[-1][0]:
            raise ValueError(f"retire: step {step} after step {self._retired[-1][0]}")
        parts = self._droppable(states, blocks, "retire")
        for end, _, _, indices in parts:
            end.fix(indices)
        (_, _, state_ids, _), (_, _, block_ids, _) = parts
        self._retired_states += len(state_ids)
        self._retired_blocks += len(block_ids)
        if len(state_ids) or len(block_ids):
            self._retired.append((step, state_ids.copy(), block_ids.copy()))

    def drain(self, step: Step) -> None:
        """Free everything retired at `step` or before: those forwards are done."""
        while self._retired and self._retired[0][0] <= step:
            _, state_ids, block_ids = self._retired.popleft()
            self._retired_states -= len(state_ids)
            self._retired_blocks -= len(block_ids)
            for end, table, ids, indices in self._resolve(state_ids, block_ids, "drain"):
                end.loosen(indices)
                self._release(end, table, ids, indices)

    def pin(self, states: npt.ArrayLike, blocks: npt.ArrayLike) -> None:
        """Forbid moves of live units, for a transfer or a kernel that holds their indices.

        Counted: as many `unpin` as `pin`. Capacity views leave out the holes that a pinned unit
        keeps from the other side, and count them again at the `unpin`.

        Raises:
            ValueError: an id is not live or named twice; nothing changed.
        """
        for end, _, _, indices in self._live(states, blocks, "pin"):
            end.fix(indices)

    def unpin(self, states: npt.ArrayLike, blocks: npt.ArrayLike) -> None:
        """Take back one `pin` of each unit.

        Raises:
            ValueError: an id is not pinned or named twice; nothing changed.
        """
        parts = self._live(states, blocks, "unpin")
        for end, _, ids, indices in parts:
            loose = ids[~end.is_fixed(indices)]
            if len(loose):
                raise ValueError(f"unpin: id {loose[0]} is not pinned")
        for end, _, _, indices in parts:
            end.loosen(indices)

    def compact(
        self,
        budget_bytes: int,
        *,
        pinned_states: npt.ArrayLike = EMPTY,
        pinned_blocks: npt.ArrayLike = EMPTY,
    ) -> tuple[Move, ...]:
        """Move at most `budget_bytes`, each move lowering a frontier; () when nothing would.

        Never moves a pinned or retired unit, nor the ids given here. The side with more hole
        bytes goes first.

        Raises:
            ValueError: a given id is not live; nothing changed.
        """
        self.pin(pinned_states, pinned_blocks)
        moves: list[Move] = []
        for side in sorted(Side, key=lambda one: -self.end_of(one).holes * self._unit_bytes(one)):
            plan = plan_budget(self.end_of(side), max(budget_bytes, 0) // self._unit_bytes(side))
            moves += self._apply(side, plan)
            budget_bytes -= len(plan) * self._unit_bytes(side)
        self.unpin(pinned_states, pinned_blocks)
        return tuple(moves)

    def clear(self) -> None:
        """Forget every id, as a flush does; counters, peaks and owner marks stay."""
        for end, table in ((self._states, self.states), (self._blocks, self.blocks)):
            end.clear()
            table.clear()
        self._retired.clear()
        self._retired_states = self._retired_blocks = 0

    # What it holds

    def report(self) -> Report:
        """Bytes and counters now; O(1)."""
        states, blocks, geometry = self._states, self._blocks, self.geometry
        low, high = geometry.state_end(states.frontier), geometry.block_start(blocks.frontier)
        above = geometry.total_bytes - high - blocks.frontier * geometry.block_bytes
        below = low - geometry.sink_bytes - states.frontier * geometry.state_bytes
        return Report(
            total_bytes=geometry.total_bytes,
            sink_bytes=geometry.sink_bytes,
            slack_bytes=above + below,
            gap_bytes=high - low,
            states=self._report_side(Side.STATE, self._retired_states, self.fundable_states()),
            blocks=self._report_side(Side.BLOCK, self._retired_blocks, self.fundable_blocks()),
            counters=replace(self._counters),
        )

    def violations(self) -> list[str]:
        """Invariants P1..P7 that do not hold, recomputed from scratch; [] is healthy."""
        return violations(self)

    def end_of(self, side: Side) -> End:
        """The positions of one side; read only."""
        return self._states if side is Side.STATE else self._blocks

    def table_of(self, side: Side) -> Table:
        """The ids of one side; read only."""
        return self.states if side is Side.STATE else self.blocks

    # Inside

    def _unit_bytes(self, side: Side) -> int:
        return self.geometry.state_bytes if side is Side.STATE else self.geometry.block_bytes

    def _resolve(self, states: npt.ArrayLike, blocks: npt.ArrayLike, verb: str) -> _Parts:
        """Both sides with the ids named and their indices; a ValueError if any is not bound."""
        return (
            (self._states, self.states, *self.states.resolve(states, verb)),
            (self._blocks, self.blocks, *self.blocks.resolve(blocks, verb)),
        )

    def _live(self, states: npt.ArrayLike, blocks: npt.ArrayLike, verb: str) -> _Parts:
        """As `_resolve`, and a retired id is a ValueError too."""
        parts = self._resolve(states, blocks, verb)
        for (_, _, ids, _), which in zip(parts, (1, 2), strict=True):
            for entry in self._retired if len(ids) else ():
                gone = ids[np.isin(ids, entry[which])]
                if len(gone):
                    raise ValueError(f"{verb}: id {gone[0]} is retired, not live")
        return parts

    def _droppable(self, states: npt.ArrayLike, blocks: npt.ArrayLike, verb: str) -> _Parts:
        """As `_live`, and a pinned id is a ValueError too; both are fixed, free ones are not."""
        parts = self._resolve(states, blocks, verb)
        for end, _, ids, indices in parts:
            if end.fixed and len(ids):
                fixed = ids[end.is_fixed(indices)]
                if len(fixed):
                    self._live(states, blocks, verb)
                    raise ValueError(f"{verb}: id {fixed[0]} is pinned, unpin it first")
        return parts

    def _release(self, end: End, table: Table, ids: IdArray, indices: IdArray) -> None:
        if not len(ids):
            return
        table.unbind(ids, indices)
        end.give(indices)
        if end is self._states:
            self._counters.states_freed += len(ids)
        else:
            self._counters.blocks_freed += len(ids)

    def _make_room(self, states: int, blocks: int) -> tuple[Move, ...]:
        """Compact the side that keeps holes, down to where the other side must reach."""
        geometry = self.geometry
        low = max(self._states.frontier, self._states.live + states)
        high = max(self._blocks.frontier, self._blocks.live + blocks)
        if geometry.state_end(low) <= geometry.block_start(high):
            return ()
        # A side that grows has filled its holes; both cannot grow, or the demand would not fit.
        if low > self._states.live + states:
            reach = geometry.states_below(geometry.block_start(high))
            return self._apply(Side.STATE, plan_frontier(self._states, reach))
        reach = geometry.blocks_above(geometry.state_end(low))
        return self._apply(Side.BLOCK, plan_frontier(self._blocks, reach))

    def _apply(self, side: Side, plan: Plan) -> tuple[Move, ...]:
        if not len(plan):
            return ()
        end, before = self.end_of(side), self.end_of(side).frontier
        end.move(plan.sources, plan.targets)
        assert end.frontier < before, f"P7: a plan left the frontier at {before}"
        move = Move(side, end.index_of(plan.sources), end.index_of(plan.targets))
        self.table_of(side).rebind(move.sources, move.targets)
        self._counters.moves += len(plan)
        self._counters.moved_bytes += len(plan) * self._unit_bytes(side)
        return (move,)

    def _cross_marks(self, states: IdArray, blocks: IdArray) -> tuple[IdArray, IdArray]:
        """Indices just granted beyond the other side's mark; the marks follow the frontiers.

        A frontier never stood beyond the other side's mark, so what lies there is granted just
        now, and last in its array.
        """
        geometry, (mark_low, mark_high) = self.geometry, self._marks
        low = geometry.state_end(self._states.frontier)
        high = geometry.block_start(self._blocks.frontier)
        self._marks = (min(max(mark_low, low), high), max(min(mark_high, high), low))
        stale_states = stale_blocks = EMPTY
        if low > mark_high:
            clean = geometry.states_below(mark_high) - self._states.frontier
            stale_states = states[clean:]
        if high < mark_low:
            clean = geometry.blocks_above(mark_low) - self._blocks.frontier
            stale_blocks = blocks[clean:]
        self._counters.stale_bytes += len(stale_states) * geometry.state_bytes
        self._counters.stale_bytes += len(stale_blocks) * geometry.block_bytes
        return stale_states, stale_blocks

    def _report_side(self, side: Side, retired: int, fundable: int) -> SideReport:
        end, unit = self.end_of(side), self._unit_bytes(side)
        live = end.live - retired
        return SideReport(
            live=live,
            retired=retired,
            holes=end.holes,
            pinned=end.fixed - retired,
            frontier=end.frontier,
            peak=end.peak,
            fundable=fundable,
            live_bytes=live * unit,
            retired_bytes=retired * unit,
            hole_bytes=end.holes * unit,
            peak_bytes=end.peak * unit,
        )
