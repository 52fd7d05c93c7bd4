"""The pool: two ends of one arena, joint fits, all-or-nothing alloc, ids that survive moves."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mempool.compaction import Plan, plan_budget, plan_frontier
from mempool.end import End
from mempool.geometry import Geometry
from mempool.grant import Grant, Move
from mempool.ids import EMPTY, IdArray, Side, Step, as_ids
from mempool.report import Counters, Report, SideReport, violations
from mempool.table import Table


@dataclass(slots=True)
class _Half:
    """One side: where its units live, what they are called, how many wait for a step."""

    side: Side
    end: End
    table: Table
    unit_bytes: int
    retired: int = 0


# One side of a call that names units of it: the ids and their physical indices.
_Named = tuple[_Half, IdArray, IdArray]


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
        self.states = Table(geometry.max_states, origin=geometry.state_first)
        self.blocks = Table(geometry.max_blocks, origin=geometry.block_last, stride=-1)
        self._states = End(geometry.max_states, origin=geometry.state_first)
        self._blocks = End(geometry.max_blocks, origin=geometry.block_last, stride=-1)
        self._low = _Half(Side.STATE, self._states, self.states, geometry.state_bytes)
        self._high = _Half(Side.BLOCK, self._blocks, self.blocks, geometry.block_bytes)
        self._retired: deque[tuple[Step, _Half, IdArray]] = deque()
        self._counters = Counters()
        # Bytes below the first mark last belonged to states, above the second to blocks, between
        # to nobody: every owner change is a frontier passing the other side's mark (P6).
        self._marks = (geometry.sink_bytes, geometry.total_bytes)

    # What fits

    @property
    def live_states(self) -> int:
        """States handed out and neither freed nor retired."""
        return self._states.live - self._low.retired

    @property
    def live_blocks(self) -> int:
        """Blocks handed out and neither freed nor retired."""
        return self._blocks.live - self._high.retired

    @property
    def retired_states(self) -> int:
        """States that wait for their step to drain."""
        return self._low.retired

    @property
    def retired_blocks(self) -> int:
        """Blocks that wait for their step to drain."""
        return self._high.retired

    @property
    def owner_marks(self) -> tuple[int, int]:
        """The two bytes between which nobody has owned anything yet."""
        return self._marks

    def fits(self, states: int, blocks: int) -> bool:
        """Whether `alloc(states, blocks)` succeeds now, moves included; O(1)."""
        return self._holds(self._states.live + states, self._blocks.live + blocks)

    def fits_after(self, states: int, blocks: int, *, freed_states: int, freed_blocks: int) -> bool:
        """Whether it would succeed once so many unpinned live units were freed; O(1)."""
        return self._holds(
            self._states.live + states - freed_states, self._blocks.live + blocks - freed_blocks
        )

    def _holds(self, states: int, blocks: int) -> bool:
        """Whether so many live units fit, each side packed as far as its fixed ones allow."""
        low = self.geometry.state_end(max(states, self._states.fixed_end))
        return low <= self.geometry.block_start(max(blocks, self._blocks.fixed_end))

    def fundable_states(self) -> int:
        """How many states alone fit now."""
        top = self.geometry.block_start(self._blocks.packed)
        return self.geometry.states_below(top) - self._states.live

    def fundable_blocks(self) -> int:
        """How many blocks alone fit now."""
        bottom = self.geometry.state_end(self._states.packed)
        return self.geometry.blocks_above(bottom) - self._blocks.live

    def upcoming_blocks(self, count: int) -> IdArray:
        """Ids of the blocks that the next grants take, in order, if nothing is freed or moved.

        At most `count`, found at one look; whether there is room for them is not asked.
        """
        return self.blocks.id_at(self._blocks.upcoming(count))

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
        moves = self._make_room(self._states.live + states, self._blocks.live + blocks)
        if moves is None:
            self._counters.refusals += 1
            return None
        state_indices, block_indices = self._states.take(states), self._blocks.take(blocks)
        stale_states, stale_blocks = self._cross_marks(state_indices)
        self._counters.grants += 1
        self._counters.states_granted += states
        self._counters.blocks_granted += blocks
        return Grant(
            self.states.bind(state_indices) if states else EMPTY,
            self.blocks.bind(block_indices) if blocks else EMPTY,
            moves,
            stale_states,
            stale_blocks,
        )

    def free(self, states: npt.ArrayLike, blocks: npt.ArrayLike) -> None:
        """Return live units at once; only what no forward in flight may still touch.

        Raises:
            ValueError: an id is free, retired, pinned, foreign, or named twice; nothing changed.
        """
        for half, ids, indices in self._droppable(states, blocks, "free"):
            half.table.unbind(ids)
            half.end.give(indices)

    def retire(self, states: npt.ArrayLike, blocks: npt.ArrayLike, step: Step) -> None:
        """Let go of live units that forward `step` may still touch; `drain(step)` frees them.

        Until then they keep their bytes and are not moved.

        Raises:
            ValueError: as `free`, or `step` is lower than one retired before; nothing changed.
        """
        if self._retired and step < self._retired[-1][0]:
            raise ValueError(f"retire: step {step} after step {self._retired[-1][0]}")
        for half, ids, indices in self._droppable(states, blocks, "retire"):
            half.end.fix(indices)
            half.retired += len(ids)
            self._retired.append((step, half, ids.copy()))

    def drain(self, step: Step) -> None:
        """Free everything retired at `step` or before: those forwards are done."""
        while self._retired and self._retired[0][0] <= step:
            _, half, ids = self._retired.popleft()
            indices = half.table.indices[ids]
            half.retired -= len(ids)
            half.end.loosen(indices)
            half.table.unbind(ids)
            half.end.give(indices)

    def pin(self, states: npt.ArrayLike, blocks: npt.ArrayLike) -> None:
        """Forbid moves of live units, for a transfer or a kernel that holds their indices.

        Counted: as many `unpin` as `pin`. Capacity views leave out the holes that a pinned unit
        keeps from the other side, and count them again at the `unpin`.

        Raises:
            ValueError: an id is not live or named twice; nothing changed.
        """
        for half, _, indices in self._live(states, blocks, "pin"):
            half.end.fix(indices)

    def unpin(self, states: npt.ArrayLike, blocks: npt.ArrayLike) -> None:
        """Take back one `pin` of each unit.

        Raises:
            ValueError: an id is not pinned or named twice; nothing changed.
        """
        named = self._live(states, blocks, "unpin")
        for half, ids, indices in named:
            loose = ids[~half.end.is_fixed(indices)]
            if len(loose):
                raise ValueError(f"unpin: id {loose[0]} is not pinned")
        for half, _, indices in named:
            half.end.loosen(indices)

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
        if not (self._states.holes or self._blocks.holes):
            return ()
        self.pin(pinned_states, pinned_blocks)
        moves: list[Move] = []
        halves = [self._low, self._high]
        for half in sorted(halves, key=lambda one: -one.end.holes * one.unit_bytes):
            plan = plan_budget(half.end, max(budget_bytes, 0) // half.unit_bytes)
            moves += self._apply(half, plan)
            budget_bytes -= len(plan) * half.unit_bytes
        self.unpin(pinned_states, pinned_blocks)
        return tuple(moves)

    def clear(self) -> None:
        """Forget every id, as a flush does; counters, peaks and owner marks stay."""
        for half in (self._low, self._high):
            half.end.clear()
            half.table.clear()
            half.retired = 0
        self._retired.clear()

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
            states=_report_half(self._low, self.fundable_states()),
            blocks=_report_half(self._high, self.fundable_blocks()),
            counters=replace(
                self._counters,
                states_freed=self._counters.states_granted - states.live,
                blocks_freed=self._counters.blocks_granted - blocks.live,
            ),
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

    def _named(self, states: npt.ArrayLike, blocks: npt.ArrayLike, verb: str) -> list[_Named]:
        """The sides that `ids` are named of; a ValueError if any is not bound."""
        named = []
        for half, given in ((self._low, states), (self._high, blocks)):
            ids = as_ids(given)
            if len(ids):
                named.append((half, ids, half.table.resolve(ids, verb)))
        return named

    def _live(self, states: npt.ArrayLike, blocks: npt.ArrayLike, verb: str) -> list[_Named]:
        """As `_named`, and a retired id is a ValueError too."""
        named = self._named(states, blocks, verb)
        for half, ids, _ in named:
            for _, other, retired in self._retired if half.retired else ():
                gone = ids[np.isin(ids, retired)] if other is half else EMPTY
                if len(gone):
                    raise ValueError(f"{verb}: id {gone[0]} is retired, not live")
        return named

    def _droppable(self, states: npt.ArrayLike, blocks: npt.ArrayLike, verb: str) -> list[_Named]:
        """As `_live`, and a pinned id is a ValueError too."""
        named = self._named(states, blocks, verb)
        for half, ids, indices in named:
            if half.end.fixed:
                fixed = ids[half.end.is_fixed(indices)]
                if len(fixed):
                    self._live(states, blocks, verb)  # retired or pinned: both are fixed
                    raise ValueError(f"{verb}: id {fixed[0]} is pinned, unpin it first")
        return named

    def _make_room(self, states: int, blocks: int) -> tuple[Move, ...] | None:
        """Make so many live units fit: compact the side that keeps holes, as far as it must."""
        geometry = self.geometry
        low = max(self._states.frontier, states)
        high = max(self._blocks.frontier, blocks)
        if geometry.state_end(low) <= geometry.block_start(high):
            return ()
        if not self._holds(states, blocks):
            return None
        # A side that grows has filled its holes; both cannot grow, or the demand would not fit.
        if low > states:
            reach = geometry.states_below(geometry.block_start(high))
            return self._apply(self._low, plan_frontier(self._states, reach))
        reach = geometry.blocks_above(geometry.state_end(low))
        return self._apply(self._high, plan_frontier(self._blocks, reach))

    def _apply(self, half: _Half, plan: Plan) -> tuple[Move, ...]:
        if not len(plan):
            return ()
        end, before = half.end, half.end.frontier
        end.move(plan.sources, plan.targets)
        assert end.frontier < before, f"P7: a plan left the frontier at {before}"
        move = Move(half.side, end.index_of(plan.sources), end.index_of(plan.targets))
        half.table.rebind(move.sources, move.targets)
        self._counters.moves += len(plan)
        self._counters.moved_bytes += len(plan) * half.unit_bytes
        return (move,)

    def _cross_marks(self, states: IdArray) -> tuple[IdArray, IdArray]:
        """Indices to zero: those just granted beyond the other side's mark.  The marks follow.

        A frontier never stood beyond the other side's mark, so what lies there is granted just
        now, and last in its array.  Blocks are granted a few at a time, in every decode step: with
        them go the free ones of a whole state's bytes, as far as the gap reaches.
        """
        geometry, (mark_low, mark_high) = self.geometry, self._marks
        low = geometry.state_end(self._states.frontier)
        high = geometry.block_start(self._blocks.frontier)
        if low <= mark_low and mark_high <= high:
            return EMPTY, EMPTY
        stale_states = stale_blocks = EMPTY
        clean_from = high  # where bytes that are zero, or blocks', begin
        if low > mark_high:
            clean = geometry.states_below(mark_high) - self._states.frontier
            stale_states = states[clean:]
        if high < mark_low:
            clean = geometry.blocks_above(mark_low)
            ahead = self._blocks.frontier + -(-geometry.state_bytes // geometry.block_bytes)
            reached = min(ahead, geometry.blocks_above(low))
            stale_blocks = self._blocks.index_of(np.arange(clean, reached))
            clean_from = geometry.block_start(reached)
        self._marks = (min(max(mark_low, low), clean_from), max(min(mark_high, high), low))
        self._counters.stale_bytes += len(stale_states) * geometry.state_bytes
        self._counters.stale_bytes += len(stale_blocks) * geometry.block_bytes
        return stale_states, stale_blocks


def _report_half(half: _Half, fundable: int) -> SideReport:
    end, unit, live = half.end, half.unit_bytes, half.end.live - half.retired
    return SideReport(
        live=live,
        retired=half.retired,
        holes=end.holes,
        pinned=end.fixed - half.retired,
        frontier=end.frontier,
        peak=end.peak,
        fundable=fundable,
        live_bytes=live * unit,
        retired_bytes=half.retired * unit,
        hole_bytes=end.holes * unit,
        peak_bytes=end.peak * unit,
    )
