"""Random lives of random requests in small worlds, against the fold and a naive oracle."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radix import ConsumedLru, ExpectedLoss
from tests.oracle.prefixes import Prefixes
from tests.oracle.world import World

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
# Blocks of 64 cannot be crossed with 14 tokens: these prompts share a long beginning.
STEMS = {1: 0, 2: 0, 4: 0, 64: 58}
NAMESPACES = st.sampled_from(["a", "b"])


class CacheMachine(RuleBasedStateMachine):
    """Running requests and loose pins live on the instance, so that the invariants see them."""

    @initialize(
        block_size=st.sampled_from(sorted(STEMS)),
        interval=st.sampled_from([0, 4, 8]),
        opportunistic=st.sampled_from([0, 4]),
        dense=st.sampled_from([0, 4]),
        probation=st.sampled_from([0, 1, 2, 4]),
        ghosts=st.sampled_from([0, 6, 10_000]),
        states=st.integers(2, 6),
        blocks=st.integers(10, 30),
        policy=st.sampled_from([ConsumedLru, ExpectedLoss]),
    )
    def build(
        self, block_size, interval, opportunistic, dense, probation, ghosts, states, blocks, policy
    ):
        coarse = max(1, block_size // 4)
        self.stem = [7] * STEMS[block_size]
        self.world = World(
            block_size=block_size,
            grid=4 * coarse,
            interval=interval * coarse,
            opportunistic=opportunistic * coarse,
            dense=dense * coarse,
            probation=probation,
            ghost_tokens=ghosts * coarse,
            states=states,
            blocks=blocks,
            policy=policy(),
        )
        self.oracle = Prefixes(block_size)
        self.running = []
        self.pins = []
        self.forgot = False  # a flush happened, or ghosts may have been trimmed

    # -- requests ---------------------------------------------------------------------------

    @rule(prompt=TOKENS, namespace=NAMESPACES, boundary=st.integers(0, 14))
    def start(self, prompt, namespace, boundary):
        prompt, boundary = self.stem + prompt, len(self.stem) + boundary
        match = self.world.match(prompt, namespace)
        self.compare(match, namespace, prompt)
        before = self.reports()
        size = self.world.block_size
        pin = self.world.cache.pin(match)
        demand = 1, -(-len(prompt) // size) - match.resume_len // size
        fits = self.world.cache.fits(*demand)
        self.world.cache.unpin(pin)
        run = self.world.start(prompt, namespace, (boundary,))
        assert (run is not None) == fits
        if run is None:
            assert self.reports() == before, "a refused request must leave nothing behind"
        else:
            assert run.resumed == match.resume_len
            self.running.append(run)

    def reports(self):
        """What is counted and held; the policy's own numbers tell of its order's bookkeeping."""
        return replace(self.world.cache.report(), policy={}), self.world.port.pool.report()

    def compare(self, match, namespace, prompt):
        known = self.oracle.matched_len(namespace, prompt)
        could = self.oracle.resume_len(namespace, prompt)
        assert match.resume_len <= could
        assert match.matched_len <= known
        assert match.resume_len <= match.resident_len <= match.matched_len
        exact = not self.forgot and not self.evicted
        if exact:
            assert match.resume_len == could
        if not self.forgot and self.world.ghost_tokens >= 10_000:
            assert match.matched_len >= self.oracle.whole_len(namespace, prompt)
        if match.junction is not None:
            assert match.junction % self.world.grid == 0
            assert match.resume_len < match.junction <= min(match.matched_len, len(prompt) - 1)

    @property
    def evicted(self) -> int:
        return self.world.cache.counters.evicted.total()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), step=st.integers(1, 7))
    def advance(self, data, step):
        run = data.draw(st.sampled_from(self.running))
        stops = run.lease.stops
        self.world.advance(run, max(run.done, len(self.stem)) + step)
        if len(run.lease.stops) < len(stops):
            self.note(run, stops)

    def note(self, run, stops):
        """Tell the oracle which states the cache holds at the stops just passed."""
        passed = [s.depth for s in stops if s.depth <= run.done]
        self.oracle.see(run.lease.namespace, run.tokens[: max(passed)])
        held = self.world.held_on_path(run.tokens[: run.done], run.lease.namespace)
        for depth in held:
            self.oracle.publish(run.lease.namespace, run.tokens[:depth])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def decode(self, data, token):
        run = data.draw(st.sampled_from(self.running))
        if run.done == len(run.tokens):
            self.world.decode(run, token)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), turn_end=st.booleans())
    def finish(self, data, turn_end):
        run = data.draw(st.sampled_from(self.running))
        self.running.remove(run)
        self.world.finish(run, turn_end=turn_end)
        self.oracle.see(run.lease.namespace, run.tokens[: run.done])
        for depth in self.world.held_on_path(run.tokens[: run.done], run.lease.namespace):
            self.oracle.publish(run.lease.namespace, run.tokens[:depth])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data):
        run = data.draw(st.sampled_from(self.running))
        self.running.remove(run)
        run.lease.abort()

    # -- pressure ---------------------------------------------------------------------------

    @rule(states=st.integers(0, 4), blocks=st.integers(0, 12))
    def evict(self, states, blocks):
        cache, pool = self.world.cache, self.world.port.pool
        fits = cache.fits(states, blocks)
        before = self.evicted
        held = pool.live_states, pool.live_blocks
        assert cache.evict(states, blocks) == fits
        assert pool.fits(states, blocks) == fits
        if not fits:
            assert self.evicted == before
            assert (pool.live_states, pool.live_blocks) == held

    @rule(prompt=TOKENS, namespace=NAMESPACES)
    def pin(self, prompt, namespace):
        self.pins.append(self.world.cache.pin(self.world.match(self.stem + prompt, namespace)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        self.world.cache.unpin(pin)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def relax(self, data):
        self.world.cache.relax(data.draw(st.sampled_from(self.pins)))

    @rule(prompts=st.lists(st.tuples(TOKENS, NAMESPACES), max_size=3))
    def expect(self, prompts):
        before = self.world.cache.report()
        self.world.cache.expect([self.world.match(self.stem + p, n) for p, n in prompts])
        assert replace(before, policy={}) == replace(self.world.cache.report(), policy={})

    @precondition(lambda self: not self.running and not self.pins)
    @rule()
    def flush(self):
        states, blocks = self.world.cache.flush()
        pool = self.world.port.pool
        assert (len(states), len(blocks)) == (pool.live_states, pool.live_blocks)
        self.world.port.free(states, blocks)
        self.forgot = True

    # -- always -----------------------------------------------------------------------------

    @invariant()
    def sound(self):
        if hasattr(self, "world"):
            self.world.check()
            self.conserve()

    def conserve(self):
        """Every live id is the tree's or a request's."""
        cache, pool = self.world.cache, self.world.port.pool
        private = [run.lease for run in self.running]
        assert pool.live_states == cache.states + sum(1 + len(p.offers) for p in private)
        assert pool.live_blocks == cache.blocks + sum(len(p.blocks) for p in private)
        assert cache.evictable_states + cache.protected_states == cache.states

    def teardown(self):
        """Let everything go, then the whole arena must come back."""
        if not hasattr(self, "world"):
            return
        for run in self.running:
            run.lease.abort()
        for pin in self.pins:
            self.world.cache.unpin(pin)
        geometry = self.world.port.pool.geometry
        assert self.world.cache.evict(geometry.max_states, 0)
        assert self.world.cache.evict(0, geometry.max_blocks)
        assert self.world.cache.states == self.world.cache.blocks == 0
        self.world.check()


CacheMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCache = CacheMachine.TestCase
