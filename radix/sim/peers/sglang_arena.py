"""SGLang 0.5.23's own unified pools and hybrid tree, built on CPU tensors without a server.

One layer of each kind stands for the model: 32 bytes a token (SGLang rounds an entry up to that)
and as many 32-byte units a state as one of the real model's states is worth in tokens of its KV.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import unified_mamba, unified_sub_pool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs

TOKEN_BYTES = 32
CHUNK_TOKENS = 8192  # SGLang's chunked_prefill_size
GRID_TOKENS = 64  # mamba_cache_chunk_size, the unit of its state depths
_CONV_BYTES = 48  # a convolution of 3 x 8 bf16, the rest of a state is fp32


@dataclass(frozen=True, slots=True)
class Arena:
    """What SGLang's factory built, and the tree over it."""

    tree: Any  # UnifiedRadixCache
    allocator: Any  # UnifiedMambaTokenToKVPoolAllocator: `.full_attn_allocator`, `.mamba_allocator`
    rows: Any  # UnifiedHybridReqToTokenPool
    page_size: int
    state_tokens: int


def build(
    *,
    total_tokens: int,
    state_tokens: int,
    page_size: int,
    rows: int,
    context_tokens: int,
    states_per_path: int = -1,
    core: str | None = None,
) -> Arena:
    """Pools of `total_tokens` x 32 bytes, sink included, under strategy `extra_buffer`.

    `rows` is the number of requests that may run at once, `context_tokens` the longest prompt with
    its answer, `states_per_path` SGLang's `--mamba-max-states-per-path` (-1: no cap). `core` is
    "rust", "python", or None: Rust where it loads. SGLang keeps its configuration process-wide, so
    a second call ends the life of the first arena.
    """
    _configure(page_size, states_per_path)
    bundle = init_unified_mamba_pools(
        **layout(state_tokens),
        page_size=page_size,
        model_context_len=context_tokens,
        extra_max_context_len=4,
        max_total_num_tokens=total_tokens,
        max_num_reqs=rows,
        unified_total_bytes=total_tokens * TOKEN_BYTES,
    )
    allocator = bundle.token_to_kv_pool_allocator
    sizes = allocator.full_attn_allocator.entry_bytes, allocator.mamba_allocator.entry_bytes
    assert sizes == (TOKEN_BYTES, state_tokens * TOKEN_BYTES), sizes
    allocator.full_attn_allocator._zero_pages_on_alloc = False  # noqa: SLF001  # nobody reads them
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=bundle.req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            enable_mamba_extra_buffer=True,
            chunked_prefill_size=CHUNK_TOKENS,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tree_core_backend=core,
        )
    )
    return Arena(tree, allocator, bundle.req_to_token_pool, page_size, state_tokens)


def _configure(page_size: int, states_per_path: int) -> None:
    """Fill SGLang's process-wide configuration, and give two CUDA-only spots their CPU twins."""
    reset_context()
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        page_size=page_size,
        chunked_prefill_size=CHUNK_TOKENS,
        mamba_radix_cache_strategy="extra_buffer",
        mamba_max_states_per_path=states_per_path,
    )
    args._mamba_cache_chunk_size = max(GRID_TOKENS, page_size)  # noqa: SLF001  # else looked up online
    publish(args, role="scheduler")
    unified_sub_pool.alloc_extend_kernel = _ExtendTwin()
    for module in (unified_sub_pool, unified_mamba):  # profiler regions cost a sixth of the time
        module.record_function = lambda _name: contextlib.nullcontext()


class _ExtendTwin:
    """The paged extend kernel, launched as `kernel[grid](...)`, for one request on the CPU."""

    def __getitem__(self, grid: object) -> Any:
        return extend_one


def extend_one(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _batch: int,
    page: int,
) -> None:
    """Write the ids of [prefix, seq) to `out`: the rest of the last page, then free pages."""
    (start,), (end,), (last,) = prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist()
    head = min(-start % page, end - start)
    out[:head] = torch.arange(last + 1, last + 1 + head)
    pages = free_pages[: -(-(end - start - head) // page), None]
    out[head:] = (pages * page + torch.arange(page)).view(-1)[: end - start - head]


def layout(state_tokens: int) -> dict[str, Any]:
    """One layer of each kind for the pools' factory: a state weighs `state_tokens` tokens."""
    words = (state_tokens * TOKEN_BYTES - _CONV_BYTES) // 4
    return {
        "device": "cpu",
        "kv_cache_dtype": torch.bfloat16,
        "head_num": 1,
        "head_dim": 8,
        "start_layer": 0,
        "end_layer": 1,
        "is_draft_worker": False,
        "use_mla_backend": True,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "mamba_layer_ids": [0],
        "full_attention_layer_ids": [1],
        "mamba2_cache_params": SimpleNamespace(
            shape=SimpleNamespace(conv=[(3, 8)], temporal=(1, 1, words)),
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            layers=[0],
        ),
        "max_mamba_cache_size": 0,  # it would be added to the budget
        "enable_memory_saver": False,
        "enable_mamba_extra_buffer": True,
        "enable_mamba_extra_buffer_lazy": False,
        "speculative_num_draft_tokens": None,
        "disable_overlap_schedule": False,
        "need_sort": False,
        "lazy_compaction": True,
    }
