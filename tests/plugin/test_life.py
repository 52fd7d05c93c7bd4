"""A request's life through SGLang's own scheduler code (`world.py`), on our pool and tree."""

import random

import pytest

from tests.plugin.world import World


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(1, 1000) for i in range(length)]


def test_second_turn_resumes_where_the_first_ended() -> None:
    world = World()
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


def test_a_burst_with_one_new_prefix_computes_it_once() -> None:
    world = World(tokens=2000, states=60, rows=8, chunk=200, opportunistic=8)
    shared = prompt(1, 64)
    burst = [world.request(shared + prompt(20 + user, 10)) for user in range(6)]
    world.run(*burst)
    assert sorted(req.num_matched_prefix_tokens for req in burst)[1] >= 56


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


def test_a_full_pool_queues_and_serves_everyone() -> None:
    world = World(tokens=150, states=8, rows=8)
    requests = [world.request(prompt(user, 30), new=20) for user in range(10)]
    world.run(*requests)
    assert all(len(req.output_ids) == 20 for req in requests)


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
    world = World(
        tokens=260,
        states=10 + 20 * (seed % 3),
        rows=6,
        chunk=24,
        overlap=overlap,
        opportunistic=8 * (seed % 2),
        kernel_chunk=4 * (seed // 2 % 2),
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
