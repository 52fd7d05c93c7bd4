"""cases.md C: which state stands where, and whether it may be used; the thread's small numbers."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from radix import Kind
from sgl_kimi_k3.state_pass import Plan
from tests.cases.published import memory, published
from tests.oracle.world import World as TreeWorld
from tests.plugin.model_world import KIMI_LINEAR, ModelWorld, build_model, sglang_runtime
from tests.plugin.test_life import prompt
from tests.plugin.world import World


def test_c7_a_leafs_state_goes_and_its_kv_in_use_stays() -> None:
    """KV lock 1, state lock 0: one state is evicted, no error, and the request's fold is exact."""
    world = TreeWorld(block_size=1)
    world.serve(range(8))
    run = world.start(range(12))  # its state was copied, so it no longer needs the leaf's
    assert (world.cache.evictable_states, world.cache.evictable_blocks) == (1, 0)
    assert world.cache.evict(world.port.pool.fundable_states() + 1, 0)
    world.check()
    assert (world.held_depths(), world.cache.blocks) == ([], 8)
    world.expect_blocks(world.cache.path_blocks(run.lease.pin), None, np.arange(8))
    world.advance(run, 12)
    world.finish(run)
    world.check()
    assert world.held_depths() == [12]


@pytest.mark.parametrize("overlap", [False, True])
def test_c8_a_prefill_beside_a_decode_publishes_what_it_wrote(overlap: bool) -> None:
    """A decodes while B (130 tokens, interval 64) prefills: states at 64 and 128, folds exact."""
    world = World(tokens=800, states=20, interval=64, grid=64, chunk=256, overlap=overlap)
    decoding = world.request(prompt(1, 10), new=30)
    for _ in range(4):
        world.step()
    prefilling = world.request(prompt(2, 130), new=2)
    world.run(prefilling)
    assert not decoding.finished()
    assert {64, 128, 130} <= set(published(world))
    world.run(decoding)


@pytest.mark.parametrize(("writes", "resumed"), [(True, 40), (False, 0)])
def test_c9_a_kernel_that_writes_nothing_publishes_nothing(writes, resumed, caplog) -> None:
    """Every warm match is 0; the states asked for inside the pass would be someone else's bytes."""
    world = World(tokens=1000, states=60, chunk=200, kernel_chunk=4, interval=8)
    world.kernel_writes = writes
    shared = prompt(1, 41)
    with caplog.at_level(logging.ERROR, logger="sgl_kimi_k3.capture"):
        world.serve(shared + prompt(2, 9), new=1)
    assert bool(caplog.messages) != writes
    warm = world.serve(shared + prompt(3, 9), new=1)
    assert warm.num_matched_prefix_tokens == resumed
    assert published(world).count(50) == 2, "the live states at the ends are the model's own"
    assert memory(world)[0] == world.tree.cache.states


def test_c10_a_state_of_a_batch_is_read_where_its_request_lies() -> None:
    """Lengths 500, 700, 900, chunk 128: 384, 1140, 2096 of the batch; not 384, 1024, 1920."""
    lengths, last = [500, 700, 900], [384, 640, 896]
    wanted = [(row, tokens, row + 5) for row, tokens in enumerate(last)]
    plan = Plan.of(lengths, wanted, 128)
    assert plan.ends.tolist() == [384, 1140, 2096]
    # 4, 6 and 8 chunks: each state is the entry of its own request's last one.
    assert plan.places.tolist() == [3, 4 + 5, 4 + 6 + 7]
    assert plan.targets[[3, 9, 17]].tolist() == [5, 6, 7]


def test_c10_states_of_three_prefills_in_one_pass_are_their_own() -> None:
    world = World(tokens=1000, states=60, chunk=400, kernel_chunk=8, interval=8, grid=8)
    batch = [world.request(prompt(user, length), new=1) for user, length in enumerate((50, 70, 90))]
    world.step()
    assert all(req.finished() for req in batch)
    depths = [*range(8, 50, 8), 50, *range(8, 70, 8), 70, *range(8, 90, 8), 90]
    assert published(world) == sorted(depths)


def test_c11_a_step_is_judged_by_the_length_it_was_launched_with() -> None:
    """Interval 128 under overlap: one state at 128, when its own result has come; none at 256
    before that, although the step that reaches it has been launched."""
    world = World(tokens=800, states=20, interval=128, grid=64, chunk=128, overlap=True)
    req = world.request(prompt(1, 300), new=2)
    seen = []
    for _ in range(4):
        world.step()
        seen.append(published(world))
    assert seen == [[], [128], [128, 256], [128, 256, 300]]
    world.run(req)


def test_c11_a_decode_step_publishes_with_its_own_result() -> None:
    """Interval 128, from 120 tokens on: steps 127 and 128 launched, result of 127: nothing; result
    of 128: one state, at 128, whatever was launched since."""
    world = World(tokens=800, states=20, interval=128, grid=64, overlap=True, chunk=256)
    req = world.request(prompt(1, 120), new=20)
    seen = {}
    while not req.finished():
        world.step()
        seen[len(req.output_ids)] = published(world)  # tokens whose results have come
    at = {}
    for results, depths in seen.items():
        at.setdefault(tuple(depths), results)
    # Output 8 is the result of step 127, output 9 of step 128; the step behind it was prepared
    # before that result, so the tree has it with the next one.
    assert at == {(): 0, (120,): 1, (120, 128): 10, (120, 128, 140): 20}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [16, 24])
def test_c12_chunks_smaller_than_the_grid(chunk: int, overlap: bool) -> None:
    """Chunk 16, interval 64, prompt 100: the state at 64 and the end are exact.

    So they are with 24, no multiple of which is 64.
    """
    world = World(chunk=chunk, interval=64, grid=64, states=20, overlap=overlap)
    world.serve(prompt(1, 100), new=1)
    world.drain()
    assert published(world) == [64, 100] + [101] * overlap, "under overlap one token more was fed"
    again = world.serve(prompt(1, 100), new=1)
    assert again.num_matched_prefix_tokens == 64


@pytest.mark.parametrize("length", [1, 10])
def test_c13_a_first_chunk_of_one_token_starts_from_nothing(length: int) -> None:
    """Every byte is NaN before; a new prompt gets 1 token of the budget, then 9: fold exact."""
    world = World(chunk=9)
    world.arena.storage.raw.fill_(0xFF)
    budget = world.request(prompt(1, 8), new=3)
    req = world.request(prompt(2, length), new=3)
    world.step()
    assert req.extend_end == 1
    world.step()
    assert req.extend_end == length
    world.run(budget, req)
    assert length in published(world)


def test_c15_a_step_writes_the_states_of_its_requests_and_no_other() -> None:
    """Row 1 has state 3 and row 2 has state 1: a decode step changes 3 and 1."""
    with sglang_runtime():
        world = ModelWorld(build_model(KIMI_LINEAR))
        world.prefill({"a": [*range(9)], "b": [*range(7)], "c": [*range(5)]})
        # Exchange the first's and the third's state, so that rows and states do not agree.
        rows = world.requests.req_index_to_mamba_index_mapping
        state = world.requests.mamba_pool.mamba_cache
        rows[1], rows[3] = 3, 1
        for part in (*state.conv, state.temporal):
            part[:, [1, 3]] = part[:, [3, 1]]
        before = [part.clone() for part in (*state.conv, state.temporal)]
        world.decode({"a": 4, "c": 4})
        for was, part in zip(before, (*state.conv, state.temporal), strict=True):
            changed = (was != part).flatten(2).any(dim=2).any(dim=0)
            assert changed.nonzero().flatten().tolist() == [1, 3]


def test_c16_what_is_resumed_is_what_both_have() -> None:
    """KV of 12 tokens, the state at 8 evicted, the one at 4 left: 4 are resumed, 12 known."""
    world = World(interval=4, chunk=16)
    world.serve(prompt(1, 12), new=1)
    tree = world.tree.cache
    assert published(world) == [4, 8, 12]
    tokens = np.array([*prompt(1, 12), 7])
    low = tree.pin(tree.match(tokens, (None, None), limit=4))
    high = tree.pin(tree.match(tokens, (None, None)))
    assert tree.evict(world.arena.pool.fundable_states() + 1, 0)
    tree.unpin(low)
    tree.unpin(high)
    assert published(world) == [4, 12]
    req = world.request(prompt(1, 12), new=1)
    req.init_next_round_input(world.tree)
    match = req.last_node
    told = match.resume_len, match.resident_len, match.matched_len, match.kind
    assert told == (4, 12, 12, Kind.INTERVAL)
    assert req.prefix_len == 4
    world.run(req)
