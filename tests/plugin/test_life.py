"""A request's life through SGLang's own scheduler code (`world.py`), on our pool and tree."""

import random

import numpy as np
import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder

from radix import Kind
from sgl_kimi_k3 import scheduler
from sgl_kimi_k3.arena import NO_IDS
from tests.plugin.world import World


def take_everything(world: World) -> np.ndarray:
    """All blocks that can be had, evicting everything: what is left is what requests hold."""
    taken = [NO_IDS]
    while (grant := world.tree.cache.acquire(0, 1)) is not None:
        taken.append(grant.blocks)
    return np.concatenate(taken)


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(1, 1000) for i in range(length)]


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_second_turn_resumes_where_the_first_ended(page_size: int) -> None:
    world = World(tokens=640, page_size=page_size)
    first = world.serve(prompt(1, 20), new=6)
    history = list(first.origin_input_ids) + list(first.output_ids)
    second = world.request(history + prompt(2, 10))
    world.step()
    # The last sampled token was never fed through the model.
    assert second.num_matched_prefix_tokens == len(history) - 1
    world.run(second)


def test_under_overlap_the_turn_ends_with_its_last_token() -> None:
    """The step launched before the end was known has fed the last token: state and KV are kept."""
    world = World(overlap=True)
    first = world.serve(prompt(1, 20), new=6)
    history = list(first.origin_input_ids) + list(first.output_ids)
    second = world.request(history + prompt(2, 10))
    world.step()
    assert second.num_matched_prefix_tokens == len(history)
    world.run(second)


def test_the_same_prompt_again_resumes_below_its_last_token() -> None:
    world = World(opportunistic=4)
    world.serve(prompt(1, 21))
    again = world.request(prompt(1, 21))
    world.step()
    assert again.num_matched_prefix_tokens == 20


@pytest.mark.parametrize(("opportunistic", "expected"), [(0, [0, 0, 40]), (4, [0, 40, 40])])
def test_shared_prefix_of_raw_tokens(opportunistic: int, expected: list[int]) -> None:
    """Stock needs the third sight; with memory free the second already resumes."""
    world = World(tokens=1000, states=60, opportunistic=opportunistic)
    shared, hits = prompt(1, 41), []
    for user in range(3):
        req = world.request(shared + prompt(10 + user, 9))
        world.run(req)
        hits.append(req.cached_tokens or req.num_matched_prefix_tokens)
    assert hits == expected


@pytest.mark.parametrize("kernel_chunk", [0, 4])
def test_a_new_prefix_takes_the_memory_of_states_that_nobody_used(kernel_chunk: int) -> None:
    """Memory is full of other prompts' optional states; the second sight resumes all the same."""
    world = World(
        tokens=1000, states=60, chunk=200, grid=4, opportunistic=4, kernel_chunk=kernel_chunk
    )
    for seed in range(100, 115):
        world.serve(prompt(seed, 40))
    shared = prompt(1, 41)
    found = [world.serve(shared + prompt(10 + user, 9)) for user in range(3)]
    assert [req.num_matched_prefix_tokens for req in found] == [0, 40, 40]
    evicted = world.tree.cache.report().evicted
    assert [kind for kind in Kind if evicted[kind]] == [Kind.OPPORTUNISTIC]


@pytest.mark.parametrize(("probation", "expected"), [(16, [0, 32, 40]), (0, [0, 0, 40])])
def test_a_new_prefix_finds_a_few_states_when_ends_fill_memory(probation, expected) -> None:
    """The first prompt leaves few at the cost of others, the second proves where it parts."""
    world = World(
        tokens=3000, states=20, rows=8, chunk=200, grid=4, opportunistic=16, kernel_chunk=4,
        probation=probation,
    )  # fmt: skip
    for seed in range(100, 200):
        world.serve(prompt(seed, 40))
    assert world.tree.cache.report().evicted[Kind.PROMPT_END], "memory is not full of ends"
    shared = prompt(1, 41)
    found = [world.serve(shared + prompt(10 + user, 9)) for user in range(3)]
    assert [req.num_matched_prefix_tokens for req in found] == expected


@pytest.mark.parametrize("few", [0, 1, 3])
def test_a_prompt_has_its_few_once_for_all_its_chunks(monkeypatch, few: int) -> None:
    """Also if it is retracted and computed again; its answer has none."""
    world = World(tokens=1000, states=60, chunk=16, grid=4, opportunistic=4, kernel_chunk=4)
    cache, taken = world.tree.cache, []
    monkeypatch.setattr(type(cache), "few", few)
    monkeypatch.setattr(cache, "evict_surplus", lambda *_, **__: False)
    monkeypatch.setattr(cache, "evict_for_few", lambda states, *_, **__: not taken.append(states))
    req = world.request(prompt(1, 90), new=9)
    while not world.running:
        world.step()
    assert sum(taken) == few
    world.retract(req)
    world.tree.reset()  # so that all of it is computed again
    world.rows.clear()
    world.allocator.clear()
    world.run(req)
    assert req.num_matched_prefix_tokens == 0
    assert sum(taken) == few


def test_a_burst_with_one_new_prefix_computes_it_once() -> None:
    world = World(tokens=2000, states=60, rows=8, chunk=200, opportunistic=8)
    shared = prompt(1, 64)
    burst = [world.request(shared + prompt(20 + user, 10)) for user in range(6)]
    world.run(*burst)
    assert sorted(req.num_matched_prefix_tokens for req in burst)[1] >= 56


@pytest.mark.parametrize("kernel_chunk", [0, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_burst_computes_its_prefix_once_without_free_memory_too(overlap, kernel_chunk) -> None:
    """Nothing optional is kept here: that others wait with the same prefix is proof enough."""
    world = World(
        tokens=2000, states=60, rows=8, chunk=200, overlap=overlap, kernel_chunk=kernel_chunk
    )
    shared, other = prompt(1, 66), prompt(2, 50)
    burst = [world.request(shared + prompt(20 + user, 10)) for user in range(4)]
    burst += [world.request(other + prompt(30 + user, 10)) for user in range(3)]
    loner = world.request(prompt(3, 40))
    world.run(*burst, loner)
    assert [req.num_matched_prefix_tokens for req in burst] == [0, 64, 64, 64, 0, 48, 48]
    assert world.tree.cache.report().taken[Kind.JUNCTION] == 2


def test_a_kernel_that_writes_inside_a_chunk_needs_no_cut() -> None:
    """The same prompt resumes within one kernel chunk; a junction is planted in one forward."""
    world = World(tokens=1000, states=60, chunk=200, kernel_chunk=4)
    shared = prompt(1, 41)
    steps = []
    for user in range(3):
        req = world.request(shared + prompt(10 + user, 9), new=1)
        before = req.num_matched_prefix_tokens
        world.step()
        steps.append((req.num_matched_prefix_tokens, req.finished()))
        assert before == 0
    assert steps == [(0, True), (0, True), (40, True)]  # one forward each, the junction at 40
    again = world.serve(shared + prompt(10, 9), new=1)
    assert again.num_matched_prefix_tokens == 48


def test_two_requests_part_inside_a_page() -> None:
    """Each goes on in a block of its own: rows are copied, the tree's block is not written."""
    world = World(tokens=640, page_size=64, chunk=256)
    first = world.serve(prompt(1, 70), new=1)
    begun = list(first.origin_input_ids)
    parted = [world.request(begun + prompt(seed, 5), new=3) for seed in (2, 3)]
    world.step()
    assert [req.num_matched_prefix_tokens for req in parted] == [70, 70]
    rows = [world.rows.blocks(req.kv.req_pool_idx, 0, 2).tolist() for req in parted]
    assert rows[0][0] == rows[1][0]
    kept = world.tree.cache.path_blocks(parted[0].lock.pin)[:2].tolist()
    assert len({rows[0][1], rows[1][1], kept[1]}) == 3
    world.run(*parted)  # every row and state is compared in every step


def test_extra_key_and_salt_isolate() -> None:
    world = World()
    for key in (None, "a", "b"):
        first = world.serve(prompt(1, 20), extra_key=key)
        assert first.num_matched_prefix_tokens == 0
        again = world.serve(prompt(1, 20) + prompt(2, 5), extra_key=key)
        assert again.num_matched_prefix_tokens == 20


def test_a_disabled_tree_keeps_nothing() -> None:
    world = World(disable=True, opportunistic=4, chunk=8)
    requests = [world.request(prompt(user % 2, 30), new=5) for user in range(6)]
    world.run(*requests)
    assert [req.num_matched_prefix_tokens for req in requests] == [0] * 6
    assert world.arena.pool.live_states == world.arena.pool.live_blocks == 0


@pytest.mark.parametrize("phase", range(8))
def test_abort_in_every_phase(phase: int) -> None:
    world = World(chunk=8, opportunistic=4)
    req = world.request(prompt(1, 30), new=3)
    for _ in range(phase):
        world.step()
    if not req.finished():
        world.abort(req)
    world.check()
    assert world.tree.mamba_protected_size() == 0
    world.serve(prompt(1, 30))


def test_retraction_keeps_decoded_work() -> None:
    world = World()
    req = world.request(prompt(1, 20), new=12)
    for _ in range(8):
        world.step()
    done = req.kv.kv_committed_len
    assert done > 24
    world.retract(req)
    world.check()
    world.step()
    assert req.num_matched_prefix_tokens == done
    world.run(req)
    assert world.tree.observer.retracted == 1


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_retracted_request_computes_nothing_again(overlap: bool, page_size: int) -> None:
    world = World(tokens=640, overlap=overlap, page_size=page_size)
    req = world.request(prompt(1, 20), new=12)
    for _ in range(6):
        world.step()
    rest = take_everything(world)
    assert world.before_decode() == (not overlap), "a step in flight is waited for"
    world.drain()
    computed = req.kv.kv_committed_len
    assert computed == 20 + 5
    world.retract(req)
    world.arena.free(NO_IDS, rest)
    world.step()
    assert req.num_matched_prefix_tokens == computed


def test_a_tested_retraction_waits_for_the_step_in_flight(monkeypatch) -> None:
    """`SGLANG_TEST_RETRACT` retracts with memory to spare; no token is lost to it either."""
    world = World(tokens=640, overlap=True)
    world.request(prompt(1, 20), new=12)
    for _ in range(4):
        world.step()
    assert world.before_decode()
    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    assert not world.before_decode()
    world.drain()
    assert world.before_decode()


def test_an_idle_step_beside_busy_ranks_is_not_waited_for() -> None:
    """Else a rank short of memory would join the others idle for as long as they have work."""
    world = World(tokens=640, overlap=True, beside=True)
    world.request(prompt(1, 20), new=12)
    for _ in range(6):
        world.step()
    take_everything(world)
    assert not world.before_decode(), "its own step in flight is waited for"
    world.drain()
    world._inflight.append(([], False))
    assert world.before_decode()


@pytest.mark.parametrize("page_size", [1, 64])
def test_an_aborted_answer_leaves_its_state(page_size: int) -> None:
    world = World(tokens=640, page_size=page_size)
    req = world.request(prompt(1, 20), new=12)
    for _ in range(6):
        world.step()
    history = [*req.origin_input_ids, *req.output_ids]
    world.abort(req)
    again = world.request(history + prompt(2, 3))
    world.step()
    assert again.num_matched_prefix_tokens == len(history) - 1 == 25


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_prefill_leaves_its_last_chunks_end(overlap: bool, page_size: int) -> None:
    world = World(tokens=640, chunk=64, overlap=overlap, page_size=page_size, rows=4)
    req = world.request(prompt(1, 200))
    world.step()
    world.step()
    assert world.chunked is req
    world.abort(req)
    world.check()
    again = world.request(prompt(1, 200), new=1)
    world.step()
    assert again.num_matched_prefix_tokens == 128
    world.run(again)


def test_an_unfinished_prefill_gives_way_to_running_requests() -> None:
    """Stock would abort the last running request here."""
    world = World(tokens=200, chunk=8)
    running = world.request(prompt(1, 7), new=30)
    world.step()
    unfinished = world.request(prompt(2, 60), new=4)
    world.step()
    world.step()
    assert world.chunked is unfinished
    rest = take_everything(world)
    assert world.before_decode()
    assert world.chunked is None
    assert world.waiting == [unfinished]
    assert world.allocator.check_decode_capacity(num_tokens=1, tree_cache=world.tree)
    world.arena.free(NO_IDS, rest)
    world.run(running, unfinished)
    assert (len(running.output_ids), len(unfinished.output_ids)) == (30, 4)


def test_a_full_pool_queues_and_serves_everyone() -> None:
    world = World(tokens=150, states=8, rows=8)
    requests = [world.request(prompt(user, 30), new=20) for user in range(10)]
    world.run(*requests)
    assert all(len(req.output_ids) == 20 for req in requests)


@pytest.mark.parametrize("waits", [1, 2])
def test_what_a_waiting_request_will_resume_outlasts_an_idle_session(waits: int) -> None:
    world = World(overtake=0)  # or both would be awaited
    ended = {user: world.serve(prompt(user, 40)) for user in (1, 2)}
    turns = {
        user: [*prompt(user, 40), *req.output_ids, *prompt(5, 3)] for user, req in ended.items()
    }
    world.request(turns[waits])
    world.scheduler.waiting_queue = world.waiting
    for _ in range(2):  # it is looked up when it has waited for a whole pass
        assert not world.tree.cache.held.expected
        scheduler.prefill_adder_class(lambda _: PrefillAdder, world.scheduler)
    while world.tree.cache.states > 1:
        assert world.tree.room.make(states=world.arena.pool.fundable_states() + 1, blocks=0)
    resumes = {
        user: world.tree.cache.match(np.array(turn), (None, None)).resume_len
        for user, turn in turns.items()
    }
    assert resumes == {waits: 40 + len(ended[waits].output_ids) - 1, 3 - waits: 0}
    world.run(*world.waiting)
    assert not world.tree.cache.held.expected


def test_flush_forgets_everything() -> None:
    world = World()
    world.serve(prompt(1, 20))
    world.tree.reset()
    world.rows.clear()
    world.allocator.clear()
    world.check()
    assert world.arena.pool.live_states == world.arena.pool.live_blocks == 0
    assert world.serve(prompt(1, 20) + prompt(2, 4)).num_matched_prefix_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_load_with_aborts_and_retraction(seed: int, overlap: bool) -> None:
    """Folds, rows and conservation are checked inside every step."""
    rng = random.Random(seed)
    page_size = (1, 4, 64)[seed // 2]
    world = World(
        tokens={1: 260, 4: 520, 64: 1536}[page_size],
        states=10 + 20 * (seed % 3),
        rows=6,
        chunk=max(24, page_size),
        overlap=overlap,
        beside=overlap,
        opportunistic=max(8, page_size) * (seed % 2),
        kernel_chunk=4 * ((seed + 1) // 2 % 2),
        probation=seed % 3,
        page_size=page_size,
    )
    histories = [prompt(1, 24)]
    for _ in range(150):
        if rng.random() < 0.4 and len(world.waiting) < 8:
            base = rng.choice(histories)
            cut = rng.randrange(len(base) + 1)
            world.request(
                base[:cut] + prompt(rng.random(), rng.randrange(1, 20)), rng.randrange(1, 9)
            )
        live = [*world.waiting, *world.running, *([world.chunked] if world.chunked else [])]
        if live and rng.random() < 0.05:
            world.abort(rng.choice(live))
        if world.running and rng.random() < 0.05:
            world.retract(rng.choice(world.running))
        before = list(world.running)
        world.step()
        histories += [[*req.origin_input_ids, *req.output_ids] for req in before if req.finished()]
    world.run(*world.waiting, *world.running, *([world.chunked] if world.chunked else []))
    world.check()
