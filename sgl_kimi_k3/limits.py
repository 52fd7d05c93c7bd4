"""What was asked for at launch, and what is in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_parallel, get_schedule, get_server_args

if TYPE_CHECKING:
    from sgl_kimi_k3.cache_adapter import KimiK3Cache


def limits(cache: KimiK3Cache) -> dict[str, dict[str, int | None]]:
    """By name: `asked` (None: nothing) and `effective`; `tokens` and `states` each if alone.

    `tokens` are those of all ranks of a DCP group; SGLang's flag is for one of them.
    """
    geometry, asked = cache.arena.geometry, get_server_args()
    rows = asked.max_total_tokens
    return {
        "running_requests": {
            "asked": asked.max_running_requests,
            "effective": cache.req_to_token_pool.size,
        },
        "tokens": {
            "asked": rows and rows * get_parallel().attn_dcp_size,
            "effective": geometry.max_blocks * geometry.block_size,
        },
        "states": {"asked": asked.max_mamba_cache_size, "effective": geometry.max_states},
        "prefill_chunk_tokens": {
            "asked": asked.chunked_prefill_size,
            "effective": get_schedule().chunked_prefill_size,
        },
    }
