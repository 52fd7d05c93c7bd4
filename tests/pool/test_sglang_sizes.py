"""Bytes of a state and of a block are SGLang's own, over models, dtypes and layouts."""

import pytest
import torch
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.mem_cache.unified_memory_pool import (
    MambaSubPoolSpec,
    MLASubPoolSpec,
    _reserved_floor_bytes,
    _store_dtype_for,
)
from sglang.srt.runtime_context import get_parallel, reset_context

from mempool import Geometry

FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
# 0-based layers of MLA; all others are KDA. Kimi K3 ends with two of them.
MODELS = {
    "kimi-k3": (93, [*range(3, 92, 4), 92], 96),
    "kimi-linear-48b": (27, [3, 7, 11, 15, 19, 23, 26], 32),
    "one-mla-layer": (4, [3], 16),
}
# model, --tp-size, SSM state, KV, --page-size: bytes of a state and of a block
TABLE = [
    ("kimi-k3", 1, FP32, BF16, 1, 449_372_160, 27_648),
    ("kimi-k3", 8, FP32, BF16, 1, 56_171_520, 27_648),
    ("kimi-k3", 8, FP32, BF16, 64, 56_171_520, 1_769_472),
    ("kimi-k3", 8, FP32, FP8, 64, 56_171_520, 884_736),
    ("kimi-k3", 8, BF16, FP8, 1, 29_039_616, 13_824),
    ("kimi-k3", 16, BF16, BF16, 64, 14_519_808, 1_769_472),
    ("kimi-linear-48b", 1, FP32, BF16, 1, 43_417_600, 8_064),
    ("kimi-linear-48b", 4, BF16, FP8, 64, 5_611_520, 258_048),
    ("one-mla-layer", 2, FP32, FP8, 16, 1_628_160, 9_216),
]


def config(name: str) -> KimiLinearConfig:
    layers, mla, heads = MODELS[name]
    return KimiLinearConfig(
        num_hidden_layers=layers,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        linear_attn_config={
            "kda_layers": [i + 1 for i in range(layers) if i not in mla],
            "full_attn_layers": [i + 1 for i in mla],
            "num_heads": heads,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    )


@pytest.mark.parametrize(("name", "tp", "ssm", "kv", "page", "state_bytes", "block_bytes"), TABLE)
def test_sizes_are_sglangs(monkeypatch, name, tp, ssm, kv, page, state_bytes, block_bytes):
    model = config(name)
    geometry = Geometry.of_model(
        80 * 10**9,
        n_kda=len(model.linear_layer_ids),
        n_mla=len(model.full_attention_layer_ids),
        num_heads=model.linear_attn_config["num_heads"],
        head_dim=model.linear_attn_config["head_dim"],
        state_itemsize=ssm.itemsize,
        kv_itemsize=kv.itemsize,
        block_size=page,
        tp=tp,
    )
    assert (geometry.state_bytes, geometry.block_bytes) == (state_bytes, block_bytes)

    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", str(ssm).removeprefix("torch."))
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")
    reset_context()  # what another test published names one rank
    with get_parallel().override(attn_tp_size=tp):
        params = model.mamba2_cache_params
    assert params.mamba_cache_per_req == state_bytes
    state = MambaSubPoolSpec(
        name="mamba",
        layer_num=len(params.layers),
        conv_state_shapes=tuple(params.shape.conv),
        conv_dtype=params.dtype.conv,
        temporal_state_shape=params.shape.temporal,
        temporal_dtype=params.dtype.temporal,
        grow_direction="up",
    )
    rows = MLASubPoolSpec(
        name="full",
        layer_num=len(model.full_attention_layer_ids),
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        store_dtype=_store_dtype_for(kv),
        grow_direction="down",
    )
    assert state.entry_bytes() == state_bytes
    assert rows.entry_bytes() * page == block_bytes
    assert _reserved_floor_bytes([rows, state], page) == geometry.sink_bytes
