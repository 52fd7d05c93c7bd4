"""States that an answer leaves while it is decoded, through SGLang's own scheduler code."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from radix import Kind, Loss
from radix.node import nodes_below
from sgl_kimi_k3 import scheduler
from tests.plugin.test_life import prompt, take_everything
from tests.plugin.world import World

TRACK = 8


def answering(**sizes) -> World:
    """A world whose prompts leave only their ends: `opportunistic` is beyond their length."""
    return World(**{"tokens": 640, "states": 60, "opportunistic": 4096, "track": TRACK, **sizes})


def parted(world: World, first, at: int, seed: int = 2):
    """A prompt that knows `at` tokens of what the first request said, and goes on differently."""
    known = [*first.origin_input_ids, *first.output_ids][:at]
    return world.serve([*known, *prompt(seed, 9)])


def depths(world: World, kind: Kind) -> list[int]:
    """Where the tree's states of that kind stand."""
    found, pending = [], list(world.tree.cache.roots.values())
    while pending:
        node = pending.pop()
        pending += node.children.values()
        if node.checkpoint is not None and node.checkpoint.kind is kind:
            found.append(node.end)
    return sorted(found)


@pytest.mark.parametrize(("page_size", "dcp"), [(1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_parts_inside_an_answer(overlap, page_size, dcp) -> None:
    """It resumes at the last of the answer's states before that; all bytes are compared."""
    world = answering(overlap=overlap, page_size=page_size, dcp=dcp)
    first = world.serve(prompt(1, 20), new=40)
    assert depths(world, Kind.OPPORTUNISTIC) == [24, 32, 40, 48, 56]
    for seed, (at, resumed) in enumerate([(23, 20), (24, 24), (43, 40), (57, 56)]):
        assert parted(world, first, at, seed).num_matched_prefix_tokens == resumed
    assert world.tree.cache.report().hit_tokens[Kind.OPPORTUNISTIC] == 24 + 40 + 56


def test_the_interval_is_the_grid_of_those_asked_for() -> None:
    """Raised to a multiple of the grid, as stock does; off with all that is optional."""
    world = answering(track=6)  # the grid is 4
    world.serve(prompt(1, 20), new=40)
    assert depths(world, Kind.OPPORTUNISTIC) == [24, 36, 48]
    for off in ({"track": 0}, {"opportunistic": 0}):
        world = answering(**off)
        world.serve(prompt(1, 20), new=40)
        assert depths(world, Kind.OPPORTUNISTIC) == []


def test_they_are_in_the_tree_while_the_answer_goes_on() -> None:
    """So they can be evicted, and resumed, before it ends."""
    world = answering(overlap=True)
    first = world.request(prompt(1, 20), new=60)
    while len(first.output_ids) < 30:
        world.step()
    assert depths(world, Kind.OPPORTUNISTIC) == [24, 32, 40, 48]
    assert world.tree.mamba_evictable_size() == 5  # and the prompt's end
    second = parted(world, first, 43)
    assert not first.finished()
    assert second.num_matched_prefix_tokens == 40
    world.run(first)


def test_a_step_that_never_ran_is_an_error() -> None:
    """Not a state that was never written and is published all the same."""
    world = answering()
    req = world.request(prompt(1, 20), new=8)
    world.step()
    batch = world._batch([req], [24])
    batch.kimi_k3_copies = None
    scheduler.prepare_for_decode(lambda _: None, batch)
    with pytest.raises(AssertionError, match="a step never ran"):
        scheduler.prepare_for_decode(lambda _: None, batch)


@pytest.mark.parametrize("others", [0, 6])
def test_they_take_free_memory_only(others: int) -> None:
    """Not that of prompts' states that nobody used, nor the reserve of new work.

    What that costs a later prompt is told apart.
    """
    world = answering()
    cache, config = world.tree.cache, world.tree.cache.config
    cache.config = replace(config, opportunistic=4)
    for seed in range(10, 10 + others):
        world.serve(prompt(seed, 40))
    cache.config = config
    first = world.request(prompt(1, 20), new=30)
    world.step()
    rest = world.arena.alloc(0, world.arena.pool.fundable_blocks() - 60)
    unproven = depths(world, Kind.OPPORTUNISTIC)
    assert cache.spare(1, 1) == bool(others)
    world.reserved = len(rest.blocks)
    evictable = world.tree.mamba_evictable_size()
    world.run(first)
    assert depths(world, Kind.OPPORTUNISTIC) == unproven
    assert world.tree.mamba_evictable_size() == evictable + 1  # the turn's end
    world.arena.free(rest.states, rest.blocks)
    world.reserved = 0
    assert parted(world, first, 43).num_matched_prefix_tokens == 20
    assert world.tree.cache.report().lost_tokens[Loss.REFUSED] == 40 - 20


def test_the_interval_is_kept_in_an_answer_too() -> None:
    """As in a prompt: it may evict what is worth less, also where nothing optional is taken."""
    world = answering(interval=16, opportunistic=0)
    world.serve(prompt(1, 20), new=40)
    assert depths(world, Kind.INTERVAL) == [16, 32, 48]


def test_what_sglang_bars_from_the_tree_leaves_nothing() -> None:
    world = answering()
    req = world.request(prompt(3, 20), new=40)
    req.skip_radix_cache_insert = True
    world.run(req)
    assert world.tree.cache.states == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", range(22, 27))
def test_an_answer_that_ends_on_or_beside_a_state(length, overlap) -> None:
    """The live state stands for it there: no depth has two, and nothing unknown is named."""
    world = answering(overlap=overlap)
    first = world.serve(prompt(1, 20), new=length - 20)
    known = [*first.origin_input_ids, *first.output_ids]
    again = world.serve([*known, *prompt(2, 5)])
    assert again.num_matched_prefix_tokens == len(known) - (not overlap)
    world.drain()
    world.check()


def test_the_first_step_is_launched_before_the_prefill_is_known() -> None:
    """Then the prompt's end is published alone: the answer's state is still ahead of its tokens."""
    world = answering(overlap=True)
    first = world.serve(prompt(1, 23), new=12)  # the first decode step leaves a state at 24
    assert depths(world, Kind.PROMPT_END) == [23]
    assert depths(world, Kind.OPPORTUNISTIC) == [24, 32]
    assert parted(world, first, 30).num_matched_prefix_tokens == 24


@pytest.mark.parametrize("overlap", [False, True])
def test_a_retracted_request_leaves_them(overlap) -> None:
    world = answering(overlap=overlap)
    req = world.request(prompt(1, 20), new=30)
    while len(req.output_ids) < 14:
        world.step()
    rest = take_everything(world)
    world.before_decode()
    world.drain()
    world.retract(req)
    world.arena.free(rest[:0], rest)
    world.run(req)
    assert len(req.output_ids) == 30


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_more_conversations_than_fit(overlap, page_size) -> None:
    """Answers that are cut, gone on from, aborted and retracted; every byte read is compared."""
    rng = random.Random(11)
    world = answering(tokens=480, states=20, rows=6, overlap=overlap, page_size=page_size)
    told: list[list[int]] = [prompt(seed, 15) for seed in range(5)]
    running = {}
    for _ in range(500):
        talk = rng.randrange(len(told))
        if talk not in running and len(running) < 6:
            known = told[talk] if len(told[talk]) < 80 else told[talk][:15]
            known = known[: len(known) - rng.randrange(len(known) - 14)]
            asked = [*known, *prompt(rng.randrange(9), rng.randrange(1, 9))]
            running[talk] = world.request(asked, new=rng.randrange(1, 30))
        alive = [req for req in running.values() if not req.finished()]
        if alive and rng.random() < 0.05:
            world.abort(rng.choice(alive))
        world.step()
        for key, req in list(running.items()):
            if req.finished():
                told[key] = [*req.origin_input_ids, *req.output_ids]
                del running[key]
    report = world.tree.cache.report()
    assert report.taken[Kind.OPPORTUNISTIC] > 5
    assert report.hit_tokens[Kind.OPPORTUNISTIC] > 0


def test_an_answers_states_are_not_on_probation() -> None:
    """They take free memory only, and push nothing out that the next prompts may need."""
    world = answering(kernel_chunk=4, grid=4, opportunistic=8, probation=4)
    world.serve(prompt(1, 40), new=60)
    world.drain()
    probation = [
        node.checkpoint.depth
        for root in world.tree.cache.roots.values()
        for node in nodes_below(root)
        if node.checkpoint and node.checkpoint.on_probation
    ]
    assert probation
    assert max(probation) < 40
    assert max(depths(world, Kind.OPPORTUNISTIC)) > 40
