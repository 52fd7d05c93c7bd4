"""What SGLang's scheduler asks of the two allocators, for pages of one token and of four."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools

from mempool import Geometry, Pool
from mempool.storage import upload
from sgl_kimi_k3 import block_ids, build, pool_adapter, state_pass
from sgl_kimi_k3.pool_adapter import ArenaAllocator
from sgl_kimi_k3.pools import build_pools
from tests.bench.pool_ops import STATE_BYTES, TOKEN_BYTES
from tests.bench.pool_peer import context, sizes
from tests.plugin.fake_device import fake_device
from tests.plugin.world import World

CPU = torch.device("cpu")
TOKENS = 8 * STATE_BYTES // TOKEN_BYTES  # eight states' worth: one is the sink, seven are usable


def bundle(page: int, device: str = "cpu") -> Any:
    """SGLang's bundle of pools, ours."""
    context(page)
    geometry = Geometry(TOKENS * TOKEN_BYTES, STATE_BYTES, page * TOKEN_BYTES, page)
    return build_pools(init_unified_mamba_pools, **sizes(geometry) | {"device": device})


def allocator(page: int, device: str = "cpu") -> ArenaAllocator:
    return bundle(page, device).token_to_kv_pool_allocator


@pytest.fixture(params=[1, 4])
def pages(request) -> ArenaAllocator:
    return allocator(request.param)


def test_what_is_available_can_be_taken_and_no_more(pages):
    """Stock's answer for one end is not always true once the other has moved."""
    states, page = pages.mamba_allocator, pages.page_size
    whole = pages.available_size()
    assert whole == 7 * STATE_BYTES // TOKEN_BYTES
    first = pages.alloc(whole // 2 // page * page)
    held = [states.alloc(1) for _ in range(states.schedulable_available_size())]
    pages.free(first[:: 2 * page])  # every second block
    assert len(held) == 3
    while held:
        room = pages.available_size()
        before = str(pages.arena.pool.report().states), pages.arena.pool.live_blocks
        assert pages.alloc(room + page) is None
        assert before == (str(pages.arena.pool.report().states), pages.arena.pool.live_blocks)
        assert pages.alloc(room) is not None
        states.free(held.pop())
    assert pages.size == pages.available_size() + pages.arena.pool.live_blocks * page
    assert pages.verify_byte_accounting() == []


def test_a_group_of_allocations_takes_nothing_ahead(pages):
    """Stock takes a state for every waiting request and shrinks the budget it admits by."""
    before = pages.available_size()
    pages.mamba_allocator.alloc_group_begin(300)
    assert pages.available_size() == before
    pages.mamba_allocator.alloc_group_end()


def test_free_slots_are_the_ids_that_are_not_live(pages):
    states = pages.mamba_allocator
    taken = states.alloc(3)
    states.free(taken[1:2])
    assert states.free_slots.tolist() == [2, *range(4, states.size + 1)]
    assert [states.is_slot_allocated(one) for one in (1, 2, 3)] == [True, False, True]
    assert states.available_size() == states.size - 2


def test_padding_is_translated_to_the_sink(pages):
    """sglang #34613: a negative id must not read the table from its end."""
    page = pages.page_size
    ids = pages.alloc(3 * page)
    rows = torch.tensor([int(ids[0]), int(ids[-1]), -1, 0])
    top = pages.arena.geometry.block_last
    expected = [top * page, (top - 2) * page + page - 1, 0, 0]
    assert pages.translate_kv_loc(rows).tolist() == expected
    assert pages.translate_write_loc(rows, out_width=6).tolist() == [*expected, 0, 0]


def test_a_double_free_is_an_error_alone_and_in_a_group(pages):
    """sglang #40305, #40348: silent on the default page size."""
    page = pages.page_size
    ids = pages.alloc(3 * page)
    pages.free_group_begin()
    pages.free(ids[:page])
    pages.free(ids[:page])
    with pytest.raises(ValueError, match="id 1 is named twice"):
        pages.free_group_end()
    assert pages.arena.pool.live_blocks == 3
    pages.free_segment(ids[:page], start_pos=0)
    with pytest.raises(ValueError, match="id 1 is free"):
        pages.free(ids[:page])
    state = pages.mamba_allocator.alloc(1)
    pages.mamba_allocator.free(state)
    with pytest.raises(ValueError, match="id 1 is free"):
        pages.mamba_allocator.free(state)


def test_a_group_of_frees_is_carried_out_at_its_end_or_when_room_is_needed(pages):
    ids, before = pages.alloc(8 * pages.page_size), pages.available_size()
    pages.free_group_begin()
    pages.free(ids[: 4 * pages.page_size])
    assert pages.available_size() == before
    pages.flush_held_frees()
    assert pages.available_size() == before + 4 * pages.page_size
    pages.free(ids[4 * pages.page_size :])
    pages.free_group_end()
    assert pages.arena.pool.live_blocks == 0


def extend_and_decode(four: ArenaAllocator) -> tuple[torch.Tensor, torch.Tensor]:
    """Six tokens become eleven and none becomes three; then both decode one more."""
    prefix, seq = torch.tensor([6, 0]), torch.tensor([11, 3])
    four.alloc(8)  # blocks 1 and 2: the first sequence ends at offset 1 of block 2
    on_device = [t.to(four.device, non_blocking=True) for t in (prefix, seq)]
    last = torch.tensor([9, -1]).to(four.device, non_blocking=True)
    extended = four.alloc_extend(on_device[0], prefix, on_device[1], seq, last, 8)
    after = torch.tensor([12, 4]) + torch.tensor([1, 0])  # of twelve tokens each block is full
    last = torch.tensor([15, 18]).to(four.device, non_blocking=True)
    decoded = four.alloc_decode(after.to(four.device, non_blocking=True), after, last)
    return extended, decoded


def test_a_partly_filled_block_is_filled_before_a_new_one():
    extended, decoded = extend_and_decode(allocator(4))
    # Block 2 takes two more; block 3 three; the second sequence starts block 4.
    assert extended.tolist() == [10, 11, 12, 13, 14, 16, 17, 18]
    assert decoded.tolist() == [20, 19]


def test_blocks_of_many_tokens_are_allocated_without_waiting(monkeypatch):
    from sglang.srt.mem_cache.allocator import unified_sub_pool

    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_args: launched.append(grid)

    with fake_device(monkeypatch) as (watch, _):
        monkeypatch.setattr(unified_sub_pool, "alloc_extend_kernel", Kernel())
        four = allocator(4, "meta")
        with watch:
            extended, decoded = extend_and_decode(four)
    assert launched == [(2,)]
    assert (extended.shape, decoded.shape) == ((8,), (2,))
    assert four.arena.pool.live_blocks == 5


def test_a_state_counts_for_every_page_size(pages):
    """sglang #36890: states stay single whatever a block holds."""
    assert pages.mamba_allocator.alloc(1).tolist() == [1]
    assert pages.arena.pool.live_states == 1
    assert pages.mamba_slot_full_token_cost() == STATE_BYTES // TOKEN_BYTES


def test_requests_run_until_not_one_more_fits():
    """sglang-rtxpro6000 #5: a request reserves what it holds, so no state is out of reach."""
    world = World(tokens=8, states=10, rows=16, disable=True)
    usable = 8 + 10 * 8 - 8  # in tokens: a state is eight, and one of them is the sink
    requests = [world.request([1000 + i, 7], new=3) for i in range(16)]
    most = 0
    while not all(req.finished() for req in requests):
        world.step()
        most = max(most, len(world.running))
    assert most == usable // (8 + 2 + 3) == 6


def test_ids_of_rows_and_tables_reach_as_far_as_they_are_indexed(pages):
    """sglang #37560: each table is as long as the ids that index it."""
    arena, page = pages.arena, pages.page_size
    assert len(arena.blocks.tensor) * page > pages.size_full
    assert len(arena.states.tensor) == pages.size_mamba + 1
    ids = pages.alloc(pages.available_size())
    assert int(ids.max()) // page == arena.pool.blocks.max_id
    assert np.array_equal(arena.blocks.tensor.numpy(), arena.pool.blocks.indices)  # all are bound


@pytest.fixture
def uploads(monkeypatch) -> list[torch.Tensor]:
    """What is copied to the device for block ids."""
    done = []
    monkeypatch.setattr(block_ids, "upload", lambda *a: done.append(upload(*a)) or done[-1])
    return done


@pytest.mark.parametrize(
    ("ids", "copies"),
    [([9], 0), ([7, 8, 9], 0), ([6, 7, 9], 1), ([9, 8, 7], 1), ([6, 8, 7, 9], 1), ([], 1)],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_a_run_of_blocks_copies_nothing(uploads, ids, copies, ahead):
    blocks = block_ids.BlockTensors(Pool(Geometry(7 * 80, 80, 20, 1)), CPU, ahead=ahead)
    found = blocks.of(np.array(ids, dtype=np.int64))
    assert found.tolist() == ids
    assert len(uploads) == copies
    where = blocks.indices_of(found)
    assert (where is None) == (not ids or (copies and not ahead))
    if where is not None:
        assert where.tolist() == [28 - one for one in ids]
        assert blocks.indices_of(found[None]) is None
    assert blocks.intact()


def steps(tokens, uploads, counts):
    """Grants of so many tokens: their ids, and how many of them copied something."""
    before = len(uploads)
    granted = []
    for count in counts:
        ids = tokens.alloc(count)
        where = tokens.translate_write_loc(ids)
        assert where.equal(tokens.arena.blocks.tensor[ids])
        assert ids.data_ptr() % 16 == where.data_ptr() % 16 == 0
        granted += ids.tolist()
    assert tokens.arena.violations() == []
    return granted, len(uploads) - before


def test_holes_are_uploaded_before_they_are_granted(uploads):
    """A decode step in an arena with holes copies nothing either; what is not foreseen is right."""
    tokens = allocator(1)
    held = tokens.alloc(48)
    tokens.free(held[::2])  # 24 holes, no two beside each other
    holes = held[::2].tolist()
    assert steps(tokens, uploads, [3] * 5) == (holes[:15], 1)
    tokens.free(held[1:2])  # a hole below those that were foreseen
    assert steps(tokens, uploads, [3, 2]) == ([int(held[1]), *holes[15:19]], 1)
    assert steps(tokens, uploads, [9, 3, 4]) == ([*holes[19:], *range(49, 60)], 0), "and beyond"


@pytest.mark.parametrize(("hole", "step"), [(5, 3), (8, 3), (2, 7)])
def test_runs_among_holes_are_foreseen_too(uploads, hole, step):
    tokens = allocator(1)
    held = tokens.alloc(40 * hole)
    tokens.free(held.reshape(-1, hole)[::2].flatten())
    holes = held.reshape(-1, hole)[::2].flatten().tolist()
    granted, copies = steps(tokens, uploads, [step] * (20 * hole // step))
    assert granted == holes[: len(granted)]
    assert copies <= 1


def test_after_moves_the_next_blocks_are_no_run_and_foreseen(uploads):
    """A move leaves an id above all live blocks for good; a flush changes nothing of that."""
    tokens = allocator(1)
    held = tokens.alloc(60)
    tokens.free(held[:40:2])
    assert tokens.arena.compact(1 << 20)
    assert steps(tokens, uploads, [4] * 8)[1] == 1
    tokens.clear()
    granted, copies = steps(tokens, uploads, [4] * 20)
    assert len(set(granted)) == 80
    assert copies <= 2


def test_a_prefill_of_scattered_blocks_uploads_only_itself(uploads, monkeypatch):
    monkeypatch.setattr(block_ids, "AHEAD", 8)
    tokens = allocator(1)
    held = tokens.alloc(48)
    tokens.free(held[::2])
    assert steps(tokens, uploads, [9]) == (held[:18:2].tolist(), 1)
    assert [one.numel() for one in uploads] == [9]
    assert steps(tokens, uploads, [4, 4]) == (held[18:34:2].tolist(), 1)


def test_views_begin_where_kernels_need_no_variant():
    """Triton compiles anew for a pointer that is no multiple of 16 bytes."""
    for ramp in (block_ids.Ramp(9, CPU), block_ids.Ramp(9, CPU, falling=True)):
        assert all(ramp.view(start, 2).data_ptr() % 16 == 0 for start in range(8))
        assert all(ramp.start_of(ramp.view(start, 2)) == start for start in range(8))
        assert ramp.start_of(ramp.view(2, 6)[2:4]) == 4
        assert ramp.start_of(ramp.view(2, 6)[::2]) is None
        assert ramp.start_of(torch.arange(9)) is None
    assert block_ids.Ramp(9, CPU).view(3, 4).tolist() == [3, 4, 5, 6]
    assert block_ids.Ramp(9, CPU, falling=True).view(3, 4).tolist() == [6, 5, 4, 3]


@pytest.mark.parametrize("count", [6, 7])
def test_what_is_uploaded_ahead_knows_its_views(count):
    ids = np.array([7, 3, 9, 4, 8, 1, 5], dtype=np.int64)[:count]
    ahead = block_ids.Ahead(ids, ids + 10, CPU)
    assert ahead.take(ids[1:2]) is None
    for start in range(count):
        one = ahead.take(ids[start : start + 1])
        assert one.data_ptr() % 16 == 0
        assert ahead.start_of(one) == start
        where = ahead.homes(start, ids[start : start + 1] + 10)
        assert (where.tolist(), where.data_ptr() % 16) == ([ids[start] + 10], 0)
        assert ahead.homes(start, ids[start : start + 1] + 11) is None
        assert ahead.start_of(where) is None
    assert ahead.take(ids[:1]) is None
    assert ahead.start_of(torch.arange(3)) is None


def test_where_a_step_writes_follows_moves():
    """The view of a run is left as soon as a part of the run has moved."""
    tokens = allocator(1)
    held = [tokens.alloc(4) for _ in range(3)]
    table = tokens.arena.blocks.tensor
    views = [tokens.translate_write_loc(one) for one in held]
    assert all(view.equal(table[one]) for view, one in zip(views, held, strict=True))
    assert all(not view.equal(one) for view, one in zip(views, held, strict=True))
    tokens.free(held[0][1:3])
    assert tokens.arena.compact(1 << 20)
    for one in (held[1], held[2]):
        assert tokens.translate_write_loc(one).equal(table[one])
    assert tokens.translate_write_loc(held[2], out_width=6)[:4].equal(table[held[2]])


def test_where_a_step_fills_holes_follows_moves():
    """Between a grant and its forward another allocation may move what was granted."""
    tokens = allocator(1)
    held = tokens.alloc(60)
    tokens.free(held[51:56:2])
    ids = tokens.alloc(3)
    assert ids.equal(held[51:56:2])
    before = tokens.translate_write_loc(ids)
    tokens.free(held[:20])
    assert tokens.arena.compact(1 << 20)
    after = tokens.translate_write_loc(ids)
    assert after.equal(tokens.arena.blocks.tensor[ids])
    assert not after.equal(before)


def test_translation_is_compiled_before_serving(pages, monkeypatch):
    """For one token, for a multiple of 16 and for any other number."""
    seen = []
    original = pool_adapter.translate_token_ids
    monkeypatch.setattr(
        pool_adapter,
        "translate_token_ids",
        lambda **given: seen.append(given["loc"]) or original(**given),
    )
    pages.prewarm_compaction()
    assert {min(len(loc), 2) + (len(loc) % 16 == 0) for loc in seen} == {1, 2, 3}
    assert all(loc.dtype == torch.int64 and not loc.any() for loc in seen)


def test_the_pass_is_compiled_for_what_forwards_name_states_by(monkeypatch):
    """SGLang's backend passes int32, the tables hold int64: one would be compiled in vain."""
    seen = []
    monkeypatch.setattr(state_pass, "warm_up", lambda *given: seen.append(given))
    rows = bundle(1).req_to_token_pool
    build._warm_up_pass(rows, torch.bfloat16)
    backend = SimpleNamespace(req_to_token_pool=rows)
    batch = rows.get_mamba_indices(torch.tensor([0, 1]))
    named = MambaAttnBackendBase._translate_mamba_indices(backend, batch)
    [(states, dtype, rows_dtype)] = seen
    assert (dtype, rows_dtype) == (torch.bfloat16, named.dtype)
    assert states.data_ptr() == rows.mamba_pool.mamba_cache.temporal[0].data_ptr()


def test_ids_that_somebody_wrote_over_are_found(pages):
    place = pages.arena
    assert place.violations() == []
    held = pages.alloc(pages.page_size)
    place.block_ids.of(np.array([3, 4], dtype=np.int64))[1] = 0
    assert place.violations() == ["block ids on the device were written over"]
    place.block_ids.of(np.array([3, 4], dtype=np.int64))[1] = 4
    assert place.violations() == []
    if pages.page_size == 1:
        place.block_ids.of(np.array([3, 5], dtype=np.int64))[1] = 0
        assert place.violations() == ["block ids on the device were written over"]
    place.slots.of(2)[0] = 9
    assert place.violations()[0] == "state ids on the device were written over"
    pages.free(held)
