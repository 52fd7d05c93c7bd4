"""The pool against a painted arena, step by step (hypothesis).

Invariants after every step: `violations()` is empty, ids and painted bytes agree, `fits` says what
`alloc` does, a failed call changes nothing, what the other kind had is zeroed and nothing live is.
Each run ends by freeing all and taking the whole arena from each side in turn.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mempool import Geometry, Pool, Side, Step
from tests.oracle.pool_oracle import BLOCK, STATE, PaintedArena, snapshot

SIDES = ((Side.STATE, STATE), (Side.BLOCK, BLOCK))
SIZES = st.sampled_from([(30, 10), (32, 8), (7, 3), (3, 7), (10, 10), (25, 1), (5, 4)])


class PoolMachine(RuleBasedStateMachine):
    @initialize(sizes=SIZES, units=st.integers(3, 7), extra=st.integers(0, 30), sink=st.booleans())
    def build(self, sizes, units, extra, sink):
        state, block = sizes
        total = max(sizes) * units + extra
        self.geometry = Geometry(total, state, block, 4, sink_bytes=0 if sink else min(sizes))
        self.pool = Pool(self.geometry)
        self.arena = PaintedArena(total, {STATE: state, BLOCK: block}, self.geometry.sink_bytes)
        self.retired: list[tuple[int, str, int]] = []
        self.pinned: list[tuple[str, int]] = []
        self.step = 0

    # What a caller may hold or drop

    def loose(self, kind):
        """Ids that are neither retired nor pinned."""
        away = {(k, one) for _, k, one in self.retired} | set(self.pinned)
        return [one for one in self.arena.ids(kind) if (kind, one) not in away]

    def some(self, data, kind):
        ids = self.loose(kind)
        chosen = data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
        return np.array(chosen, dtype=np.int64)

    def apply(self, moves):
        for move in moves:
            kind = move.side.value
            self.arena.move(kind, move.sources.tolist(), move.targets.tolist())

    def enter(self, kind, ids, stale):
        for index in stale.tolist():
            self.arena.zero(kind, index)
        indices = self.pool.table_of(Side(kind)).index_of(ids).tolist()
        for one, index in zip(ids.tolist(), indices, strict=True):
            assert not self.arena.was_other(kind, index), f"{kind} {index} is stale"
            self.arena.enter(kind, one, index)

    def demand(self, states, blocks):
        return self.arena.room({STATE: states, BLOCK: blocks})

    # Rules

    @rule(states=st.integers(0, 4), blocks=st.integers(0, 9))
    def alloc(self, states, blocks):
        fits, before = self.pool.fits(states, blocks), snapshot(self.pool)
        assert fits == self.demand(states, blocks)
        moved = self.pool.report().counters.moved_bytes
        upcoming = self.pool.upcoming_blocks(5).tolist()
        free = self.geometry.max_blocks - self.pool.live_blocks - self.pool.report().blocks.retired
        assert len(upcoming) == min(5, free)
        grant = self.pool.alloc(states, blocks)
        assert (grant is not None) == fits
        if grant is None:
            assert snapshot(self.pool) == before
            self.check_refusal(states, blocks)
            return
        assert (len(grant.states), len(grant.blocks)) == (states, blocks)
        if not grant.moves:
            assert grant.blocks[: len(upcoming)].tolist() == upcoming[:blocks]
        self.apply(grant.moves)
        self.enter(STATE, grant.states, grant.stale_states)
        self.enter(BLOCK, grant.blocks, grant.stale_blocks)
        bytes_of = {Side.STATE: self.geometry.state_bytes, Side.BLOCK: self.geometry.block_bytes}
        more = sum(len(move.sources) * bytes_of[move.side] for move in grant.moves)
        assert self.pool.report().counters.moved_bytes - moved == more

    @rule(side=st.sampled_from(SIDES), leave=st.integers(0, 3))
    def fill(self, side, leave):
        """Take nearly all of one kind: what goes wrong goes wrong when the gap is gone."""
        if side[0] is Side.STATE:
            self.alloc(max(self.pool.fundable_states() - leave, 0), 0)
        else:
            self.alloc(0, max(self.pool.fundable_blocks() - leave, 0))

    def check_refusal(self, states, blocks):
        """Nothing is stranded: without fixed units, what is live and the demand pass the arena."""
        if self.retired or self.pinned:
            return
        geometry = self.geometry
        demand = states * geometry.state_bytes + blocks * geometry.block_bytes
        pads = max(geometry.state_bytes, geometry.block_bytes) + geometry.block_bytes - 2
        usable = geometry.total_bytes - geometry.sink_bytes - pads
        assert self.arena.live_bytes() + demand > usable

    @rule(data=st.data())
    def free(self, data):
        states, blocks = self.some(data, STATE), self.some(data, BLOCK)
        ask = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 9)))
        promise = self.pool.fits_after(*ask, freed_states=len(states), freed_blocks=len(blocks))
        self.pool.free(states, blocks)
        for kind, ids in ((STATE, states), (BLOCK, blocks)):
            for one in ids.tolist():
                self.arena.leave(kind, one)
        assert self.pool.fits(*ask) == promise

    @rule(data=st.data(), later=st.integers(0, 2))
    def retire(self, data, later):
        self.step += later
        states, blocks = self.some(data, STATE), self.some(data, BLOCK)
        self.pool.retire(states, blocks, Step(self.step))
        for kind, ids in ((STATE, states), (BLOCK, blocks)):
            for one in ids.tolist():
                self.retired.append((self.step, kind, one))
                self.arena.fix(kind, one, 1)

    @rule(back=st.integers(0, 3))
    def drain(self, back):
        done = self.step - back
        self.pool.drain(Step(done))
        for step, kind, one in self.retired:
            if step <= done:
                self.arena.leave(kind, one)
        self.retired = [entry for entry in self.retired if entry[0] > done]

    @rule(data=st.data())
    def pin(self, data):
        states, blocks = self.some(data, STATE), self.some(data, BLOCK)
        self.pool.pin(states, blocks)
        for kind, ids in ((STATE, states), (BLOCK, blocks)):
            for one in ids.tolist():
                self.pinned.append((kind, one))
                self.arena.fix(kind, one, 1)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        kind, one = data.draw(st.sampled_from(self.pinned))
        self.pool.unpin(*([one], []) if kind == STATE else ([], [one]))
        self.pinned.remove((kind, one))
        self.arena.fix(kind, one, -1)

    @rule(data=st.data(), budget=st.integers(-1, 90))
    def compact(self, data, budget):
        spared = {kind: self.some(data, kind) for kind in (STATE, BLOCK)}
        for kind, ids in spared.items():
            for one in ids.tolist():
                self.arena.fix(kind, one, 1)
        before = self.pool.report()
        moves = self.pool.compact(budget, pinned_states=spared[STATE], pinned_blocks=spared[BLOCK])
        self.apply(moves)
        after = self.pool.report()
        moved = after.counters.moved_bytes - before.counters.moved_bytes
        assert moved <= max(budget, 0)
        for move in moves:
            count = len(move.sources)
            side = f"{move.side.value}s"
            assert getattr(after, side).frontier <= getattr(before, side).frontier - count
        for kind, ids in spared.items():
            for one in ids.tolist():
                self.arena.fix(kind, one, -1)

    @rule(data=st.data())
    def misuse(self, data):
        """A call with one bad id among good ones raises and changes nothing."""
        side, kind = data.draw(st.sampled_from(SIDES))
        good = self.loose(kind)
        away = [one for one in self.arena.ids(kind) if one not in good]
        table = self.pool.table_of(side)
        free = [one for one in range(1, table.max_id + 1) if (kind, one) not in self.arena.index_of]
        bad = data.draw(st.sampled_from([0, -1, table.max_id + 1, *good[:1], *away, *free]))
        ids = [*good, bad]
        before = snapshot(self.pool)
        for call in (self.pool.free, lambda *pair: self.pool.retire(*pair, Step(self.step))):
            with pytest.raises(ValueError, match=f"id {bad} is "):
                call(*(ids, []) if side is Side.STATE else ([], ids))
        assert snapshot(self.pool) == before

    @rule()
    def clear(self):
        self.pool.clear()
        for kind, one in list(self.arena.index_of):
            self.arena.leave(kind, one)
        self.retired, self.pinned = [], []

    # Checks

    @invariant()
    def healthy(self):
        assert self.pool.violations() == []

    @invariant()
    def painted(self):
        for side, kind in SIDES:
            ids = self.arena.ids(kind)
            indices = [self.arena.index_of[kind, one] for one in ids]
            assert self.pool.table_of(side).index_of(ids).tolist() == indices
            assert np.count_nonzero(self.pool.table_of(side).indices) == len(ids)
        away = [kind for _, kind, _ in self.retired]
        assert self.pool.live_states == len(self.arena.ids(STATE)) - away.count(STATE)
        assert self.pool.live_blocks == len(self.arena.ids(BLOCK)) - away.count(BLOCK)

    @invariant()
    def fundable(self):
        states, blocks = self.pool.fundable_states(), self.pool.fundable_blocks()
        for more in {0, 1, states // 2, states}:
            for ask in ((more, 0), (more, 1), (more, blocks // 2), (more, blocks)):
                assert self.pool.fits(*ask) == self.demand(*ask), f"{ask}"
        assert self.demand(states, 0)
        assert not self.demand(states + 1, 0)
        assert self.demand(0, blocks)
        assert not self.demand(0, blocks + 1)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for kind, one in self.pinned:
            self.pool.unpin(*([one], []) if kind == STATE else ([], [one]))
        self.pool.drain(Step(self.step))
        gone = {(kind, one) for _, kind, one in self.retired}
        rest = {k: [i for i in self.arena.ids(k) if (k, i) not in gone] for k in (STATE, BLOCK)}
        self.pool.free(rest[STATE], rest[BLOCK])
        for states, blocks in ((self.geometry.max_states, 0), (0, self.geometry.max_blocks)):
            grant = self.pool.alloc(states, blocks)
            assert grant is not None, f"the arena no longer holds {states} states, {blocks} blocks"
            assert self.pool.violations() == []
            assert not self.pool.fits(1, 0) or not self.pool.fits(0, 1)
            self.pool.free(grant.states, grant.blocks)
        assert self.pool.report().free_bytes == self.pool.report().gap_bytes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
