"""cases.md B: leaks, aborts, retraction, progress; each with the thread's small numbers.

The scheduler is `tests/plugin/world.py`: SGLang's own request and allocation code over our pool and
tree, where every forward checks the state and the KV rows it starts from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radix import Kind
from tests.cases.published import blocks_free, memory, published
from tests.oracle.world import World as TreeWorld
from tests.plugin.test_life import prompt
from tests.plugin.world import World

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@pytest.mark.parametrize("overlap", [False, True])
def test_b1_a_state_taken_at_match_comes_back(overlap: bool) -> None:
    """100 lookups then aborts, 100 then refusals: nothing is held; request 101 is admitted."""
    world = World(tokens=100, states=10, overlap=overlap)
    world.serve(prompt(1, 20), new=1)
    world.drain()
    before = memory(world)
    longer = prompt(1, 20) + prompt(2, 20)
    for _ in range(100):
        req = world.request(longer)
        req.init_next_round_input(world.tree)
        assert req.kv.holds_mamba, "the lookup takes the state that the prefix is copied to"
        world.abort(req)
        assert memory(world) == before
    with blocks_free(world, 10):
        held = memory(world)
        req = world.request(longer)
        for _ in range(100):
            world.step()
            assert memory(world) == held
    assert world.waiting == [req]
    world.run(req)
    assert req.num_matched_prefix_tokens == 20


PHASES = {  # launches before the abort -> states it leaves
    "queued": (0, []),
    "chunk 1 launched": (1, [4]),
    "chunk 1 done, chunk 2 launched": (2, [8]),
    "last chunk launched": (3, [12]),
    "first decode launched": (4, [12, 13]),
}


@pytest.mark.parametrize("phase", PHASES)
def test_b3_an_abort_with_a_late_result(phase: str) -> None:
    """Prompt 12, chunk 4: no lock, no row, nothing but the tree's; cleaning up again does nothing.

    Where stock inserts nothing, what was computed stays, evictable, and exact.
    """
    launches, states = PHASES[phase]
    world = World(chunk=4, overlap=True)
    req = world.request(prompt(1, 12))
    for _ in range(launches):
        world.step()
    world.abort(req)
    world.check()
    done = memory(world)
    assert done == (len(states), max(states, default=0), len(states), 0, 0)
    assert published(world) == states
    world.drain()
    for again in (world.tree.abandon, world.tree.captures.drop):
        again(req)
    assert memory(world) == done
    assert world.waiting == world.running == []


def test_b4_a_request_barred_from_the_tree_is_chunked_like_any_other() -> None:
    """Prompt 10, chunk 4: 4, 4 and 2 tokens, 10 of KV at most; nothing of it in the tree."""
    world = World(chunk=4, interval=4)
    req = world.request(prompt(1, 10), new=2)
    req.skip_radix_cache_insert = True
    seen = []
    for _ in range(3):
        world.step()
        seen.append((req.extend_end, world.arena.pool.live_blocks))
    assert seen == [(4, 4), (8, 8), (10, 10)]
    world.run(req)
    assert memory(world) == (0, 0, 0, 0, 0)
    assert world.tree.cache.ghost_tokens == 0


def test_b4_nor_does_it_leave_anything_when_it_gives_way() -> None:
    """Retracted or aborted halfway: its KV may not follow from its tokens."""
    for end in ("retract", "abort"):
        world = World(chunk=4, interval=4)
        req = world.request(prompt(1, 10), new=6)
        req.skip_radix_cache_insert = True
        for _ in range(5):
            world.step()
        getattr(world, end)(req)
        assert world.tree.cache.states == world.tree.cache.ghost_tokens == 0
        world.run(req)
        assert memory(world) == (0, 0, 0, 0, 0)


def test_b4_nobody_waits_for_a_state_that_it_will_not_leave() -> None:
    world = World(tokens=1000, chunk=200, interval=16)
    barred, other = (world.request(prompt(1, 64) + prompt(own, 8), new=9) for own in (2, 3))
    barred.skip_radix_cache_insert = True
    world.step()
    assert {barred, other} <= {*world.running, world.chunked}


@pytest.mark.parametrize("unmatched", [True, False])
def test_b4_nor_does_one_wait_that_cannot_resume(unmatched: bool) -> None:
    """It asked for the logprobs of its whole prompt: every token is computed in any case."""
    world = World(tokens=1000, chunk=400, interval=16, kernel_chunk=4)
    shared = prompt(1, 64)
    world.request(shared + prompt(2, 8), new=9)
    follower = world.request(shared + prompt(3, 8), new=9)
    if unmatched:
        follower.return_logprob, follower.logprob_start_len = True, 0
    world.step()
    assert (follower in world.running) == unmatched


def test_b5_a_retracted_prefill_leaves_the_trees_pages_alone() -> None:
    """Prompt 12, chunk 4: after 20 foreign tokens a prompt that shares 4 reads the right bytes."""
    world = World(chunk=4, interval=4, tokens=200)
    req = world.request(prompt(1, 12))
    world.step()
    world.step()
    assert world.chunked is req
    world.abort(req)
    world.check()  # live = cached: nothing is both free and the tree's
    assert published(world) == [4, 8]
    world.serve(prompt(5, 20), new=1)
    shared = world.request(prompt(1, 4) + prompt(6, 5))
    world.run(shared)  # every row and state it reads is compared
    assert shared.num_matched_prefix_tokens == 4


@pytest.mark.parametrize("free", range(5))
def test_b6_a_page_begun_is_charged(free: int) -> None:
    """Pages of 16, an extend of 16 from inside a page, 16 tokens free: deferred, no retraction.

    It needs a copy of the page begun and one more; with more room it runs, and never fails.
    """
    world = World(tokens=160, states=4, page_size=16)
    known = world.serve(prompt(1, 24), new=1).origin_input_ids
    with blocks_free(world, free):
        held = memory(world)
        req = world.request([*known, *prompt(2, 16)], new=1)
        for _ in range(6):
            world.step()
            if req.finished():
                break
            assert memory(world) == held, "deferred, with nothing taken"
        assert world.tree.observer.retracted == 0
        assert free >= 2 or not req.finished(), "two pages do not fit"
        assert free < 4 or req.num_matched_prefix_tokens == 24
    world.run(req)


@pytest.mark.parametrize("page_size", [1, 16])
def test_b6_a_chunk_without_room_waits(page_size: int) -> None:
    """Nothing is left: the unfinished prefill takes no chunk and keeps what it has."""
    world = World(tokens=160, states=4, page_size=page_size, chunk=32)
    req = world.request(prompt(1, 96), new=1)
    world.step()
    with blocks_free(world, 0, states=0):
        held = memory(world)
        for _ in range(3):
            world.step()
            assert memory(world) == held
            assert world.chunked is req
    world.run(req)


def test_b8_a_checkpoint_without_room_is_skipped_and_counted() -> None:
    """Four states, all locked: no error, one skip; after an unlock the next one is published."""
    world = TreeWorld(block_size=1, interval=4, states=4, blocks=24)
    for first in (100, 200, 300):
        world.serve(range(first, first + 4))
    pins = [world.cache.pin(world.match(range(first, first + 5))) for first in (100, 200, 300)]
    run = world.start(range(12))
    assert world.port.pool.report().free_bytes == 0
    before = world.cache.report()
    world.advance(run, 4)
    seen = world.cache.report()
    assert (seen.skipped[Kind.INTERVAL], seen.taken) == (1, before.taken)
    world.cache.unpin(pins.pop())
    world.advance(run, 12)
    assert world.cache.report().skipped == {**before.skipped, Kind.INTERVAL: 1}
    assert 8 in world.held_on_path(range(12))
    world.finish(run, turn_end=False)
    world.check()  # every state and row in the tree is the fold of its key


def slot_of(world: World, req: Req) -> int:
    """Where its live state lies."""
    return int(world.rows.translate_mamba_indices(req.kv.mamba_pool_idx.view(1)))


@pytest.mark.parametrize("room", [True, False])
def test_b10_a_retracted_request_goes_on_from_its_own_state(room: bool) -> None:
    """Prompt 5, 4 decoded, retracted; another takes its slot: fold(tokens[0:9]) is exact.

    With room its state is in the tree and nothing is computed again; without, all of it is.
    """
    world = World(tokens=64 if room else 24, states=1)
    req = world.request(prompt(1, 5), new=8)
    for _ in range(5):
        world.step()
    assert req.kv.kv_committed_len == 9
    slot = slot_of(world, req)
    world.retract(req)
    assert published(world)[-1] == 9
    world.waiting.remove(req)
    other = world.request(prompt(2, 5), new=8)
    world.step()
    assert (slot_of(world, other) == slot) != room
    world.run(other)
    assert (9 in published(world)) == room
    world.waiting.append(req)
    world.step()
    assert req.num_matched_prefix_tokens == (9 if room else 0)
    world.run(req)  # every step compares the state that it starts from
    assert len(req.output_ids) == 8
    assert world.tree.mamba_protected_size() == world.tree.full_protected_size() == 0


def test_b11_asking_again_takes_no_second_lock() -> None:
    """Refused five times, then run: no lock is left; never two unfinished prefills (World)."""
    world = World(tokens=100, states=10, chunk=8)
    world.serve(prompt(1, 20), new=1)
    req = world.request(prompt(1, 20) + prompt(2, 20), new=4)
    with blocks_free(world, 10):
        held = memory(world)
        for _ in range(5):
            world.step()
            assert memory(world) == held
    others = [world.request(prompt(user, 20), new=2) for user in (3, 4)]
    world.run(req, *others)
    assert len(world.tree.cache.pins) == 0
    assert world.tree.mamba_protected_size() == world.tree.full_protected_size() == 0
