"""Who goes first, by what is known rather than learned."""

import numpy as np

from radix import admit
from tests.cache.script import Logged
from tests.cache.small import evict_states, keep, tiny
from tests.oracle.world import World


def test_what_a_queue_will_resume_goes_last():
    """sglang touches waiting prefixes for its LRU; here a longer, younger state goes first."""
    cache, pool = tiny(1000, 200, 10)
    waited_for, longer = keep(cache, pool, 0, 10), keep(cache, pool, 100, 30)
    match = cache.match(np.append(waited_for, 9), None)
    cache.expect([match, match])
    assert cache.evict(pool.fundable_states() + 1, 0)
    assert cache.match(np.append(longer, 9), None).resume_len == 0
    assert cache.match(np.append(waited_for, 9), None).resume_len == 10
    assert cache.violations() == []
    assert cache.evict(pool.fundable_states() + 1, 0), "it is no pin"
    assert (cache.states, list(cache.held.expected), cache.violations()) == (0, [], [])


def test_an_expectation_ends_with_the_use_and_with_the_next_word():
    cache, pool = tiny(1000, 200, 10)
    first, second = keep(cache, pool, 0, 10), keep(cache, pool, 100, 10)
    cache.expect([cache.match(np.append(tokens, 9), None) for tokens in (first, second)])
    lease = admit(cache, pool, np.append(first, 9), None)
    assert [checkpoint.node.end for checkpoint in cache.held.expected] == [10]
    lease.abort()
    cache.expect([])
    assert (list(cache.held.expected), cache.violations()) == ([], [])
    assert cache.match(np.append(second, 9), None).node.checkpoint.expected is False


def test_a_hit_refreshes_the_consumed_state_only():
    """sglang #31643, #31648: states X4, X8, Y4; after a hit of X at 8 the victim is X4."""
    world = World(block_size=1, interval=4)
    world.serve(range(8))
    world.serve(range(100, 104))
    world.start(range(9)).lease.abort()
    evict_states(world, 1)
    assert world.held_on_path(np.arange(9)) == [8]
    assert world.serve([*range(100, 104), 1, 2]) == 4


def test_superseded_ends_go_first():
    """sglang #31230: of 40 turns all earlier ends go before an older, idle session's."""
    policy = Logged()
    world = World(block_size=1, interval=0, policy=policy)
    world.serve(range(500, 510))
    session = [world.serve(range(4 * turn)) for turn in range(1, 41)]
    assert session == [0, *range(4, 160, 4)]
    evict_states(world, 39)
    assert sorted(policy.log) == [("prompt_end", depth) for depth in range(4, 160, 4)]
    assert world.held_depths() == [10, 160]
    assert world.serve(range(162)) == 160
    assert world.serve(range(500, 512)) == 10


def test_a_junction_is_never_superseded():
    """sglang #31230: where sessions part stays, their earlier turns go."""
    world = World(block_size=1)
    trunk = list(range(8))
    for own in (100, 200, 300):
        world.serve([*trunk, *range(own, own + 4)])
        world.serve([*trunk, *range(own, own + 8)])
    assert world.held_depths() == [8, 12, 12, 12, 16, 16, 16]
    evict_states(world, 3)
    assert world.held_depths() == [8, 16, 16, 16]


def test_opportunistic_states_go_before_superseded_ends():
    world = World(block_size=1, opportunistic=4)
    world.serve(range(8))
    world.serve(range(12))
    assert world.held_depths() == [4, 8, 12]
    for left in ([8, 12], [12]):
        evict_states(world, 1)
        assert world.held_depths() == left


def test_room_for_opportunistic_states_is_made_of_surplus_ones_only():
    """The oldest goes first; one that was used, is waited for or pinned stays, as do all ends."""
    world = World(block_size=1, opportunistic=4)
    for first in range(0, 500, 100):
        world.serve(range(first, first + 6), first)
    assert world.serve([*range(4), 7], 0) == 4
    world.cache.expect([world.match([*range(100, 104), 7], 100)])
    pin = world.cache.pin(world.match([*range(200, 204), 7], 200))
    assert world.cache.surplus_states == 2
    free = world.port.pool.fundable_states()
    assert not world.cache.evict_surplus(free + 3, 0)
    assert not world.cache.evict_surplus(free + 1, 0, reserve_states=2)
    assert world.cache.states == 11
    for count, left in ((1, [4, 6]), (2, [6])):
        assert world.cache.evict_surplus(free + count, 0)
        assert world.cache.states == 11 - count
        assert (world.held_depths(300), world.held_depths(400)) == ([6], left)
    world.cache.unpin(pin)
    assert world.cache.surplus_states == 1
    world.check()


def test_a_prompts_own_extras_are_thinned_evenly():
    """Every other one first, so that what is left covers it with twice the gap, and so on."""
    world = World(block_size=1, opportunistic=4)
    world.serve(range(34))
    assert world.held_depths() == [*range(4, 33, 4), 34]
    for left in ([8, 16, 24, 32], [16, 32], [32]):
        evict_states(world, world.cache.surplus_states - len(left))
        assert world.held_depths() == [*left, 34]
    world.check()
