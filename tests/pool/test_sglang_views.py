"""SGLang's own strided views over the arena address the bytes that our geometry says."""

import pytest
import torch
from sglang.srt.mem_cache.allocator.unified_sub_pool import MultiEndedAllocator
from sglang.srt.mem_cache.unified_memory_pool import (
    MambaSubPoolSpec,
    MLASubPoolSpec,
    UnifiedKVPool,
)
from sglang.srt.runtime_context import get_parallel

from mempool import Geometry, Pool

LAYERS = {"n_kda": 3, "n_mla": 2}
HEADS, HEAD_DIM, LORA, ROPE, BLOCK_SIZE = 4, 16, 32, 16, 4
SIZES = LAYERS | {
    "num_heads": HEADS,
    "head_dim": HEAD_DIM,
    "kv_lora_rank": LORA,
    "rope_dim": ROPE,
}


@pytest.fixture(scope="module")
def arena() -> tuple[Geometry, UnifiedKVPool]:
    geometry = Geometry.of_model(400_000, **SIZES, block_size=BLOCK_SIZE)
    specs = [
        MLASubPoolSpec(
            name="full",
            layer_num=LAYERS["n_mla"],
            kv_lora_rank=LORA,
            qk_rope_head_dim=ROPE,
            store_dtype=torch.bfloat16,
            grow_direction="down",
        ),
        MambaSubPoolSpec(
            name="mamba",
            layer_num=LAYERS["n_kda"],
            conv_state_shapes=((3, 3 * HEADS * HEAD_DIM),),
            conv_dtype=torch.bfloat16,
            temporal_state_shape=(HEADS, HEAD_DIM, HEAD_DIM),
            temporal_dtype=torch.float32,
            grow_direction="up",
        ),
    ]
    pool = UnifiedKVPool(
        total_bytes=geometry.total_bytes,
        sub_pool_specs=specs,
        device="cpu",
        enable_memory_saver=False,
        page_size=BLOCK_SIZE,
    )
    return geometry, pool


def test_sizes_agree(arena):
    geometry, theirs = arena
    assert theirs.mamba_spec("mamba").entry_bytes() == geometry.state_bytes
    assert theirs.mla_spec("full").entry_bytes() * BLOCK_SIZE == geometry.block_bytes
    assert theirs.min_slot_index("mamba") == geometry.state_first
    assert -(-theirs.min_slot_index("full") // BLOCK_SIZE) == geometry.block_first


def test_dcp_widens_blocks_and_not_states_as_theirs(arena):
    geometry, theirs = arena
    with get_parallel().override(attn_dcp_size=4):
        full, mamba = (
            MultiEndedAllocator(
                kvcache=None,
                unified_buffer=theirs,
                sub_pool_name=name,
                device="cpu",
                is_id_owner=True,
                page_size=page_size,
                shards_under_dcp=name == "full",
            )
            for name, page_size in (("full", BLOCK_SIZE), ("mamba", 1))
        )
    wide = Geometry.of_model(400_000, **SIZES, block_size=BLOCK_SIZE, dcp=4)
    assert (full.page_size, full.entry_bytes_per_page) == (wide.block_size, wide.block_bytes)
    assert (mamba.page_size, mamba.entry_bytes_per_page) == (1, wide.state_bytes)
    assert wide.block_bytes == geometry.block_bytes


def test_state_views_cover_exactly_one_state(arena):
    geometry, theirs = arena
    theirs._raw.zero_()
    index = int(Pool(geometry).states.indices.size) - 2
    (conv,), temporal = theirs.mamba_views_for("mamba")
    assert conv.shape[0] == temporal.shape[0] == LAYERS["n_kda"]
    conv[:, index] = 1.0
    temporal[:, index] = 1.0
    low, high = index * geometry.state_bytes, (index + 1) * geometry.state_bytes
    assert theirs._raw[low:high].view(torch.int16).count_nonzero() > 0
    theirs._raw[low:high] = 0
    assert not theirs._raw.any()


def test_row_views_cover_exactly_one_block(arena):
    geometry, theirs = arena
    theirs._raw.zero_()
    for row_view in theirs.mla_views_for("full"):
        row_view[geometry.block_last * BLOCK_SIZE : (geometry.block_last + 1) * BLOCK_SIZE] = 1.0
    low = geometry.block_last * geometry.block_bytes
    assert bool(theirs._raw[low : low + geometry.block_bytes].view(torch.bfloat16).eq(1).all())
    theirs._raw[low : low + geometry.block_bytes] = 0
    assert not theirs._raw.any()


def test_whole_units_of_both_kinds_fit_beside_each_other(arena):
    """Every granted unit, written through SGLang's views, leaves all others as they were."""
    geometry, theirs = arena
    theirs._raw.zero_()
    pool = Pool(geometry)
    states = pool.alloc(2, 0).states
    blocks = pool.alloc(0, pool.fundable_blocks()).blocks
    (_,), temporal = theirs.mamba_views_for("mamba")
    rows = theirs.mla_views_for("full")
    for index in pool.blocks.index_of(blocks).tolist():
        for row_view in rows:
            row_view[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE] = 1.0
    for index in pool.states.index_of(states).tolist():
        temporal[:, index] = 2.0
    for index in pool.blocks.index_of(blocks).tolist():
        low = index * geometry.block_bytes
        assert bool(theirs._raw[low : low + geometry.block_bytes].view(torch.bfloat16).eq(1).all())
    assert pool.report().gap_bytes < geometry.block_bytes
