"""Queues with lazy entries stay in proportion to what they queue; a relaxed pin keeps KV only."""

import pytest

from radix import ConsumedLru, ExpectedLoss
from radix.eviction import VOID_ENTRIES_MIN
from radix.survival import _WAITS
from tests.oracle.world import World


def books(policy):
    """Every growing collection of a policy."""
    if isinstance(policy, ConsumedLru):
        return [policy._heap]
    ranking, survival = policy._ranking, policy._survival
    return [
        policy._stale, ranking._front, ranking._news, ranking._checkpoints, ranking._row,
        survival._waits, survival._uses,
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [ConsumedLru, ExpectedLoss])
def test_using_one_state_again_and_again_grows_nothing(policy) -> None:
    order = policy()
    world = World(policy=order)
    world.serve(list(range(12)))
    for _ in range(5 * VOID_ENTRIES_MIN):
        pin = world.cache.pin(world.match(range(13)))
        world.cache.touch(pin)
        world.cache.unpin(pin)
    assert world.cache.states
    assert 0 < sum(len(book) for book in books(order)) < 4 * VOID_ENTRIES_MIN + _WAITS


def test_ghosts_that_come_and_go_leave_nothing_behind() -> None:
    world = World(states=4, blocks=6)
    for _ in range(3 * VOID_ENTRIES_MIN):
        world.serve(range(12), turn_end=True)  # resident
        assert world.cache.evict(4, 6)  # and a ghost again, the whole arena free
        assert world.cache.ghost_tokens == 12
    assert len(world.cache._ghosts._leaves) < 2 * VOID_ENTRIES_MIN


def test_a_relaxed_pin_gives_up_the_state_and_keeps_the_kv() -> None:
    world = World(states=4, blocks=6)
    world.serve(range(12))
    cache, match = world.cache, world.match(range(13))
    pin = cache.pin(match)
    assert (cache.protected_states, cache.protected_blocks) == (1, 6)
    assert not cache.evict(4, 0)  # the pinned state stands in the way
    cache.relax(pin)
    cache.relax(pin)
    assert (cache.protected_states, cache.protected_blocks) == (0, 6)
    assert cache.evict(3, 0)
    assert cache.states
    assert cache.evict(4, 0)
    assert (cache.states, cache.blocks) == (0, 6)
    assert cache.path_blocks(pin).size == 6
    assert cache.violations() == []
    cache.unpin(pin)  # nothing needs that KV any more
    assert cache.blocks == 0
    assert world.match(range(13)).matched_len == 12
    world.check()
    with pytest.raises(ValueError, match="is not open"):
        cache.relax(pin)
