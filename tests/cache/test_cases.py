"""What broke for others in a radix tree with states, with the numbers of the public threads.

Every test names the thread it comes from. `World` checks the fold of every state and block that a
request restores, and after each served request the bytes of the whole cache.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import radix
from radix import Kind, SlotId
from tests.cache.small import evict_all, evict_states, keep, tiny
from tests.oracle.world import World


def test_a_state_starved_by_kv_evicts_exactly_one_checkpoint():
    """sglang #34441, #36713: 200-byte states, 10-byte tokens, 1000 bytes, all of them used."""
    cache, pool = tiny(1000, 200, 10)
    private = pool.alloc(0, 30)
    older, newer = keep(cache, pool, 0, 5), keep(cache, pool, 100, 25)
    assert pool.report().free_bytes == 0
    assert pool.fundable_states() == 0
    assert cache.evict(1, 5)
    assert (cache.states, cache.blocks, pool.report().free_bytes) == (1, 25, 250)
    assert cache.match(older, None).resident_len == 0
    assert cache.match(np.append(newer, 0), None).resume_len == 25
    assert not pool.fits(1, 6)
    assert cache.evict(1, 6)
    assert (cache.states, cache.blocks) == (0, 0)
    assert pool.live_blocks == len(private.blocks)


def test_tokens_starved_by_states_evict_exactly_one_checkpoint():
    """The mirror case of sglang #34441: a KV demand is met by a state's bytes."""
    cache, pool = tiny(1000, 200, 10)
    for first in (0, 100, 200, 300):
        keep(cache, pool, first, 5)
    assert pool.fundable_blocks() == 0
    assert cache.evict(0, 25)
    assert (cache.states, cache.blocks) == (3, 15)
    assert pool.fundable_blocks() == 25


def test_an_impossible_demand_evicts_nothing():
    """sglang #34441, #34676: everything evictable is pinned, or not enough."""
    cache, pool = tiny(1000, 200, 10)
    pinned = keep(cache, pool, 0, 5)
    keep(cache, pool, 100, 25)
    pin = cache.pin(cache.match(np.append(pinned, 0), None))
    before = cache.report()
    assert pool.report().free_bytes == 300
    assert cache.fits(3, 15)
    for demand in ((4, 0), (3, 16), (0, 76)):
        assert not cache.fits(*demand)
        assert not cache.evict(*demand)
        assert cache.acquire(*demand) is None
    assert cache.report() == before
    assert cache.evict(3, 15)
    assert (cache.states, cache.blocks) == (1, 5)
    cache.unpin(pin)
    assert cache.evict(5, 0)
    assert cache.states == 0


def test_the_gap_is_counted_once():
    """sglang #39294: 2 states or 6 tokens fit, 1 state and 4 tokens need one victim."""
    cache, pool = tiny(100, 30, 10)
    tokens = keep(cache, pool, 0, 1)
    assert (pool.fundable_blocks(), pool.fundable_states()) == (6, 2)
    assert cache.evict(1, 3)
    assert cache.states == 1
    pin = cache.pin(cache.match(np.append(tokens, 7), None))
    assert cache.acquire(1, 4) is None
    assert cache.states == 1
    cache.unpin(pin)
    grant = cache.acquire(1, 4)
    assert (len(grant.states), len(grant.blocks), cache.states) == (1, 4, 0)


def test_tree_owned_blocks_survive_a_retracted_request():
    """sglang #38355: prompt of 12, one chunk of 4 inserted, then retracted."""
    world = World(block_size=1, interval=4)
    run = world.start(range(12))
    world.advance(run, 4)
    run.lease.abort()
    world.check()
    pool = world.port.pool
    assert (
        (pool.live_blocks, pool.live_states) == (world.cache.blocks, world.cache.states) == (4, 1)
    )
    assert world.serve(range(500, 520)) == 0
    assert world.serve([0, 1, 2, 3, 99, 98]) == 4


def test_a_continuing_chunk_costs_no_checkpoint():
    """sglang #38151: 24 of 30 states are held, 6 are checkpoints, room for 8 tokens is left."""
    world = World(block_size=1, states=30, blocks=24 + 44 + 8)
    for first in range(100, 700, 100):
        world.serve(range(first, first + 4))
    held = world.cache.acquire(23, 0)
    run = world.start(range(44))
    assert len(held.states) + 1 + world.cache.states == 30
    for up_to in range(4, 44, 4):
        assert run.lease.extend(up_to)
        world.advance(run, up_to)
    world.advance(run, 43)
    assert all(run.lease.extend(up_to) for up_to in range(45, 53))
    assert world.cache.states == 6
    assert world.port.pool.report().free_bytes == 0
    assert run.lease.extend(53)
    assert world.cache.states == 5


@pytest.mark.parametrize(("interval", "resumed", "states"), [(0, 0, [6]), (2, 4, [2, 4, 6])])
def test_a_split_keeps_the_deeper_state(interval, resumed, states):
    """sglang #22935, #21158: an identical prompt; one that parts at 5 splits its edge."""
    world = World(block_size=1, grid=2, interval=interval)
    world.serve(range(1, 7))
    assert world.held_depths() == states
    assert world.match(range(1, 7)).resume_len == resumed
    assert world.match(range(1, 8)).resume_len == 6
    assert world.serve([1, 2, 3, 4, 5, 77]) == resumed
    assert world.match(range(1, 7)).resume_len == 4
    assert world.match(range(1, 8)).resume_len == 6


def test_a_full_hit_recomputes_from_the_state_before():
    """LMCache #5249: interval 64, a prompt of 128 with a state at 128 restores 64."""
    world = World(block_size=64, grid=64, interval=64)
    world.serve(range(128))
    assert world.held_depths() == [64, 128]
    assert world.serve(range(128)) == 64
    assert world.match(range(129)).resume_len == 128


def test_a_state_is_kept_at_its_own_depth_only():
    """sglang #38815: two prompts share 96 tokens, states stand at multiples of 64."""
    world = World(block_size=32, grid=64, interval=64)
    world.serve(range(128))
    second = [*range(96), *range(1000, 1096)]
    assert world.serve(second) == 64
    assert world.serve([*range(96), *range(2000, 2096)]) == 64
    assert 96 not in world.held_depths()
    assert {64, 128, 192} == set(world.held_depths())
    assert world.match([*second, 1]).resume_len == 192


@pytest.mark.parametrize("depth", [0, 4, 16, -8])
def test_an_offer_that_does_not_fit_its_key_is_refused(depth):
    """sglang #38815: a state of another depth than the key's."""
    world = World(block_size=8, grid=8)
    tokens = np.arange(8)
    pin = world.cache.pin(world.match(tokens))
    grant = world.cache.acquire(1, 1)
    offer = (depth, SlotId(int(grant.states[0])), Kind.PROMPT_END)
    before = world.cache.report()
    with pytest.raises(ValueError, match=f"a state at {depth} "):
        world.cache.commit(pin, tokens, None, grant.blocks, [offer], finished=True)
    assert world.cache.report() == before


def test_a_partial_block_never_makes_an_empty_edge():
    """sglang #28692, #36696: block 64; keys of 63 tokens, and of 65 that part at 63."""
    world = World(block_size=64, grid=64, ghost_tokens=0)
    world.serve(range(64))
    before = world.cache.report()
    assert world.match(range(63)).matched_len == 0
    parted = [*range(63), 900, 901]
    assert world.match(parted).matched_len == 0
    assert world.cache.report() == before
    world.serve(parted)
    assert world.held_depths() == [64, 65]
    world.serve(range(200, 328))
    assert world.match([*range(200, 327), 900, 901]).matched_len == 64
    world.serve([*range(200, 327), 900, 901])
    assert world.held_depths() == [64, 64, 65, 128, 129]
    evict_all(world)
    assert world.cache.roots == {}


def test_a_state_inside_kv_in_use_goes_alone():
    """sglang #21379, #21406: the state's KV is pinned from below, the state is not."""
    world = World(block_size=1, interval=4)
    world.serve(range(8))
    pin = world.cache.pin(world.match(range(9)))
    assert (world.cache.evictable_states, world.cache.evictable_blocks) == (1, 0)
    evict_states(world, 1)
    assert (world.held_depths(), world.cache.blocks) == ([8], 8)
    world.expect_blocks(world.cache.path_blocks(pin), None, np.arange(8))
    world.cache.unpin(pin)
    assert world.serve(range(10)) == 8


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("interval", [16, 32, 64])
def test_the_resumed_state_is_counted_in_tokens(interval, block_size):
    """vllm #55507, #55601: the state at 64 of a hit of 64, whatever the interval and block."""
    world = World(block_size=block_size, grid=16, interval=interval)
    world.serve(range(80))
    for length in (17, 33, 65, 70, 81):
        match = world.match(range(length))
        held = [d for d in (*range(interval, 80, interval), 80) if d < length]
        assert match.resume_len == max(held, default=0)
        assert len(world.cache.path_blocks(match)) * block_size == match.resume_len
        if match.slot is not None:
            world.expect_state(match.slot, None, np.arange(match.resume_len))


def test_kv_without_a_state_is_not_a_hit():
    """vllm #43090, LMCache #2863: KV of 12 tokens, the state at 8 gone, the one at 4 left."""
    world = World(block_size=1, interval=4)
    world.serve(range(12))
    shallow = world.cache.pin(world.cache.match(np.arange(12), None, limit=4))
    evict_states(world, 1)
    assert world.held_depths() == [4, 12]
    match = world.match(range(12))
    assert (match.resume_len, match.resident_len, match.matched_len) == (4, 12, 12)
    assert world.serve(range(12)) == 4
    world.cache.unpin(shallow)
    evict_all(world)
    match = world.match(range(12))
    assert (match.resume_len, match.resident_len, match.matched_len) == (0, 0, 12)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_burst_hits_in_its_second_run_and_plants_once(fresh):
    """sglang #28222: 4 at once, 1024 shared and 128 own tokens, interval 256."""
    world = World(block_size=64, grid=64, interval=256)

    def burst(own: int) -> list[int]:
        runs = [
            world.start([*range(1024), *range(own + 1000 * n, own + 1000 * n + 128)])
            for n in range(4)
        ]
        for up_to in range(128, 1153, 128):
            for run in runs:
                world.advance(run, up_to)
        for run in runs:
            world.finish(run, turn_end=False)
        world.check()
        return [run.resumed for run in runs]

    assert burst(10_000) == [0, 0, 0, 0]
    assert world.held_depths() == [256, 512, 768, 1024, 1152, 1152, 1152, 1152]
    assert world.cache.blocks == 16 + 4 * 2
    assert burst(50_000 if fresh else 10_000) == [1024] * 4
    assert world.held_depths().count(1024) == 1


def test_evidence_of_one_tenant_is_no_evidence_for_another():
    """sglang #26747, LMCache #4825: A plants and loses a shared prefix, B sees neither."""
    world = World(block_size=1)
    prompt = [*range(11), 20, 21]
    assert [world.serve([*range(11), n, n]) for n in (17, 18, 19)] == [0, 0, 8]
    match = world.match(prompt, "b")
    assert (match.matched_len, match.resume_len, match.junction) == (0, 0, None)
    evict_all(world)
    assert world.match(prompt).junction == 8
    assert world.match(prompt, "b").junction is None
    assert world.serve(prompt, "b") == 0
    assert world.held_depths("b") == [13]


def test_a_pin_is_let_go_once_and_where_it_was_taken():
    world, other = World(), World()
    for each in (world, other):
        each.serve(range(8))
    pin, foreign = (each.cache.pin(each.match(range(9))) for each in (world, other))
    for call in (world.cache.unpin, world.cache.touch):
        with pytest.raises(ValueError, match="is not open in this cache"):
            call(foreign)
    assert world.cache.protected_states == 1
    world.cache.unpin(pin)
    with pytest.raises(ValueError, match="is not open in this cache"):
        world.cache.unpin(pin)
    assert (world.cache.protected_states, world.cache.protected_blocks) == (0, 0)
    other.cache.unpin(foreign)
    for each in (world, other):
        each.check()


def flush_all(world):
    world.port.free(*world.cache.flush())


@pytest.mark.parametrize("forget", [evict_all, flush_all])
def test_a_stale_match_cannot_be_pinned(forget):
    """Nor waited for: what is gone is passed over, and counts do not change."""
    world = World(opportunistic=4)
    world.serve(range(8))
    matches = [world.match(range(9)), world.match([*range(4), 50, 51])]
    assert [match.kind for match in matches] == [Kind.PROMPT_END, Kind.OPPORTUNISTIC]
    world.cache.expect(matches)
    forget(world)
    for expected in (matches, []):
        world.cache.expect(expected)
        assert world.cache.surplus_states == 0
        world.check()
    for match in matches:
        with pytest.raises(ValueError, match=f"the state at {match.resume_len} is gone"):
            world.cache.pin(match)
    assert not world.cache.pins


@pytest.mark.parametrize("first", ["finish", "abort"])
@pytest.mark.parametrize("second", ["finish", "abort", "extend"])
def test_a_finished_lease_refuses_everything(first, second):
    world = World()
    run = world.start(range(8))
    world.advance(run, 8)
    arguments = {"finish": (run.tokens,), "abort": (), "extend": (9,)}
    getattr(run.lease, first)(*arguments[first])
    before = world.cache.report(), world.port.pool.report()
    with pytest.raises(ValueError, match="the lease is finished"):
        getattr(run.lease, second)(*arguments[second])
    assert (world.cache.report(), world.port.pool.report()) == before
    world.check()


def test_two_hash_seeds_have_the_same_victims():
    """Every TP rank runs its own scheduler and must evict the same states."""

    def victims(seed: int, hash_seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("script.py")), str(seed)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    first = victims(1, "0")
    assert len(first) > 100
    assert len({line.split()[0] for line in first}) > 2
    assert victims(1, "4242") == first
    assert victims(2, "0") != first


def test_the_example_of_the_readme():
    world = World(block_size=4)
    prompts = [[*range(100, 119), *range(n, n + 5)] for n in (1000, 2000, 3000, 4000)]
    held = [(world.serve(p), world.cache.states, world.cache.blocks) for p in prompts[:3]]
    assert held == [(0, 1, 6), (0, 3, 8), (16, 4, 10)]
    blocks = []
    while world.cache.states:
        evict_states(world, 1)
        blocks.append(world.cache.blocks)
    assert blocks == [8, 6, 4, 0]
    assert world.cache.ghost_tokens == 40
    assert world.match(prompts[3]).junction == 16


def test_the_readme_and_the_code_number_the_same_invariants():
    readme = Path(radix.__file__).with_name("README.md")
    cited = {
        number
        for source in readme.parent.glob("*.py")
        for number in re.findall(r"\bR\d+\b", source.read_text("utf-8"))
    }
    assert len(cited) > 5
    assert set(re.findall(r"^- \*\*(R\d+)\*\*", readme.read_text("utf-8"), re.MULTILINE)) == cited
