"""When a shared prefix is first resumed."""

import numpy as np
import pytest

from radix import Kind
from radix.node import nodes_below
from radix.probation import Probation
from tests.cache.small import evict_states
from tests.oracle.world import World


def prompts(shared, own, count):
    """`count` prompts with one common head and tails of their own."""
    return [
        [*range(100, 100 + shared), *range(1000 * (i + 1), 1000 * (i + 1) + own)]
        for i in range(count)
    ]


def test_checkpoint_in_unique_tokens_does_not_hit_for_ever():
    """cases F1: 0, 0, then 8 of a shared 11 (grid 4)."""
    world = World(block_size=1, grid=4)
    resumed = [world.serve(prompt) for prompt in prompts(11, 5, 8)]
    assert resumed == [0, 0, 8, 8, 8, 8, 8, 8]
    assert world.cache.report().resumed_tokens == 48


def test_dense_intervals_hit_on_the_second_sight():
    world = World(block_size=1, grid=4, interval=4)
    assert [world.serve(prompt) for prompt in prompts(11, 5, 8)] == [0] + [8] * 7


def test_opportunistic_states_hit_on_the_second_sight_while_memory_is_free():
    world = World(block_size=1, grid=4, opportunistic=4)
    assert [world.serve(prompt) for prompt in prompts(11, 5, 4)] == [0, 8, 8, 8]


def test_opportunistic_states_are_not_planned_without_free_memory():
    world = World(block_size=1, grid=4, opportunistic=4, states=1, blocks=18)
    assert [world.serve(prompt) for prompt in prompts(11, 5, 2)] == [0, 0]


def test_long_shared_prefix_is_resumed_within_one_step():
    """12,000 shared and 2,000 own tokens: the second prompt already resumes."""
    step = 1024
    world = World(
        block_size=64, grid=64, opportunistic=step, ghost_tokens=10**6, states=60, blocks=2000
    )
    first, second = prompts(12_000, 2_000, 2)
    assert world.serve(first) == 0
    assert world.serve(second) >= 12_000 - step


def test_evidence_survives_eviction_as_a_ghost():
    world = World(block_size=1, grid=4)
    first, second, third = prompts(11, 5, 3)
    world.serve(first)
    assert world.cache.evict(world.port.pool.geometry.max_states, 0)
    assert world.cache.states == world.cache.blocks == 0
    match = world.match(second)
    assert (match.matched_len, match.resident_len, match.resume_len, match.junction) == (
        11,
        0,
        0,
        8,
    )
    assert world.serve(second) == 0
    assert world.serve(third) == 8


def test_ghosts_are_bounded():
    world = World(block_size=1, grid=4, ghost_tokens=20)
    for prompt in prompts(0, 16, 6):
        world.serve(prompt)
    world.cache.evict(world.port.pool.geometry.max_states, 0)
    assert world.cache.violations() == []
    assert 0 < world.cache.ghost_tokens <= 20
    assert world.match(prompts(0, 16, 6)[5]).matched_len == 16


@pytest.mark.parametrize("other", ["b", ("a", 1), None])
def test_a_tenants_first_sight_is_not_anothers_second(other):
    """cases H2."""
    world = World(block_size=1, grid=4)
    first, second, third = prompts(11, 5, 3)
    world.serve(first, "a")
    assert world.serve(second, other) == 0
    assert world.match(third, other).resume_len == 0
    assert world.held_depths(other) == [16]
    assert world.match(first, "a").matched_len == 16


def test_match_is_pure():
    world = World()
    world.serve(range(10))
    before = world.cache.report()
    world.match([0, 1, 2, 9])
    world.match(range(20), "elsewhere")
    assert world.cache.report() == before
    assert list(world.cache.roots) == [None]
    world.check()


def test_the_last_token_is_always_computed():
    """cases C1 and C3: a state that contains the last token is never restored."""
    world = World(block_size=1, grid=2)
    world.serve(range(1, 7))
    assert world.match(range(1, 7)).resume_len == 0
    assert world.match(range(1, 8)).resume_len == 6
    dense = World(block_size=1, grid=2, interval=2)
    dense.serve(range(1, 7))
    assert dense.match(range(1, 7)).resume_len == 4
    assert dense.match(range(1, 8)).resume_len == 6


def test_limit_caps_the_resume_depth():
    world = World(block_size=1, grid=2, interval=2)
    world.serve(range(8))
    tokens = np.arange(9)
    assert [world.cache.match(tokens, None, limit=n).resume_len for n in (0, 3, 4, 8, 99)] == [
        0, 2, 4, 8, 8,
    ]  # fmt: skip


def test_states_that_cost_no_cut_stand_on_every_grid_step():
    """The second prompt resumes within a grid step of what it shares, wherever that ends."""
    for shared in (97, 103):
        world = World(block_size=1, grid=4, opportunistic=64, dense=4, states=200, blocks=600)
        assert [world.serve(prompt) for prompt in prompts(shared, 30, 2)] == [0, shared // 4 * 4]


def test_dense_states_take_a_quarter_of_what_is_free():
    """127 tokens have 31 grid steps, and 4 * 32 states do not fit: gaps grow with depth instead."""
    world = World(block_size=1, grid=4, opportunistic=64, dense=4, states=70, blocks=200)
    world.serve(list(range(127)))
    assert world.cache.report().taken[Kind.OPPORTUNISTIC] == 23  # 4, 8, ..., 60; 64, 72, ..., 120


def test_states_that_nobody_used_are_as_good_as_free_memory():
    """Memory is full of earlier prompts' states: a new shared prefix is covered all the same."""
    world = World(block_size=1, grid=4, opportunistic=64, dense=4, states=200, blocks=600)
    for first in range(10_000, 18_000, 1000):
        world.serve(range(first, first + 60))
    assert (world.cache.surplus_states, world.cache.states) == (8 * 14 - 7, 8 * 15)
    assert [world.serve(prompt) for prompt in prompts(103, 30, 3)] == [0, 100, 100]
    assert world.cache.report().evicted[Kind.PROMPT_END] == 0
    world.check()


def test_once_ends_fill_memory_a_second_prompt_proves_a_prefix_for_the_third():
    """Without probation: what may be continued is worth more than what might be shared."""
    world = World(
        block_size=1, grid=4, opportunistic=64, dense=4, probation=0, states=200, blocks=600
    )
    for first in range(10_000, 60_000, 1000):
        world.serve(range(first, first + 60))
    assert world.cache.surplus_states == 0
    assert [world.serve(prompt) for prompt in prompts(103, 30, 3)] == [0, 0, 100]
    world.check()


def strangers(world: World, count: int) -> None:
    """Prompts that share nothing, the last ones numbered lowest."""
    for first in range(10_000 + 1000 * count, 10_000, -1000):
        world.serve(range(first, first + 60))


def test_a_few_states_are_on_probation_once_ends_fill_memory():
    """The second prompt with a new prefix resumes at one of few states, and proves the rest."""
    for probation, expected in ((16, [0, 64, 100]), (0, [0, 0, 100])):
        world = World(
            block_size=1, grid=4, opportunistic=32, dense=4, probation=probation, states=20,
            blocks=3000,
        )  # fmt: skip
        strangers(world, 60)
        assert [world.serve(prompt) for prompt in prompts(103, 30, 3)] == expected
        world.check()


def test_probation_ends_with_a_use_or_when_younger_ones_come():
    """What was used stays; what was not makes room for the next, and no end has to go for it."""
    world = World(block_size=1, grid=4, opportunistic=32, dense=4, states=20, blocks=3000)
    strangers(world, 60)
    used, unused = list(range(100)), list(range(1000, 1100))
    for prompt in (used, unused):
        world.serve(prompt, "new")
    assert world.start([*used[:70], 9], "new").lease.abort() is None
    strangers(world, 20)
    assert world.match([*used[:70], 9], "new").resume_len == 64
    assert world.match([*unused[:70], 9], "new").resume_len == 0
    assert world.match([*unused, 9], "new").resume_len == 100
    world.check()


def test_a_short_turn_brings_nothing_on_probation():
    """A few blocks more are no new prefix: states there would drive out those of new prompts."""
    world = World(block_size=1, grid=4, opportunistic=32, dense=4, states=20, blocks=3000)
    strangers(world, 60)
    world.serve(range(40))
    evict_states(world, world.cache.surplus_states)
    world.port.alloc(world.port.pool.fundable_states(), 0)  # running requests have the rest
    assert (world.cache.surplus_states, world.cache.few) == (0, 2)
    for prompt_len, expected in ((60, [60]), (100, [64, 96, 100])):
        match = world.match(range(prompt_len))
        stops = world.cache.stops(match, start=match.resume_len, prompt_len=prompt_len)
        assert [stop.depth for stop in stops] == expected


def test_probation_outlasts_a_request_that_waited_and_gave_up():
    """That somebody waited for a state is no reason to drop it."""
    world = World(block_size=1, grid=4, opportunistic=32, dense=4, states=20, blocks=3000)
    strangers(world, 60)
    world.serve(range(100), "new")
    waiting = world.match([*range(70), 9], "new")
    world.cache.expect([waiting])
    world.cache.expect([])
    evict_states(world, world.cache.surplus_states)
    assert world.match([*range(70), 9], "new").resume_len == 64
    world.check()


def test_a_prompt_has_its_few_once():
    """However many states were planned while memory was free, and however they are taken."""
    world = World(block_size=1, grid=4, opportunistic=32, dense=4, states=20, blocks=6000)
    strangers(world, 30)
    run = world.start(range(100), "new")
    planned = [stop for stop in run.lease.stops if stop.kind is Kind.OPPORTUNISTIC]
    while world.cache.surplus_states:  # fewer states have fewer on probation
        assert world.cache.evict(world.port.pool.fundable_states() + world.cache.surplus_states, 0)
    assert (len(planned), run.lease.few, world.cache.surplus_states) == (24, 3, 0)
    at_others_cost = 0
    for stop in planned:
        world.port.alloc(world.port.pool.fundable_states(), 0)  # an end left its KV, too
        surplus = world.cache.surplus_states
        at_others_cost += run.lease.take(stop) is not None and not surplus
    assert at_others_cost == 3
    run.lease.abort()


def test_what_is_waited_for_does_not_go_for_a_few():
    world = World(block_size=1, grid=4, opportunistic=32, dense=4, states=20, blocks=3000)
    strangers(world, 60)
    evict_states(world, world.cache.surplus_states)
    world.port.alloc(world.port.pool.fundable_states(), 0)
    ends = [node.checkpoint for node in nodes_below(world.cache.roots[None]) if node.checkpoint]
    world.cache.expect([], ends)
    assert (world.cache.surplus_states, world.cache.few) == (0, 2)
    assert not world.cache.evict_for_few(2, 0)
    world.cache.expect([], ends[2:])
    assert world.cache.evict_for_few(2, 0)
    assert len(world.cache.held.expected) == len(ends) - 2
    world.check()


def test_probation_holds_eight_prompts_or_two_states_of_each():
    """One in 16 of all states; of these two for a prompt, or an eighth where that is more."""
    probation = Probation(16)
    sizes = [(held, probation.most(held), probation.few(held)) for held in (15, 16, 40, 200, 640)]
    assert sizes == [(15, 0, 0), (16, 1, 1), (40, 2, 2), (200, 12, 2), (640, 40, 5)]
    assert (Probation(0).most(640), Probation(0).few(640)) == (0, 0)
