"""SGLang's pools with our arena behind them.

SGLang's own factory (`init_unified_mamba_pools`) builds the byte buffer, the per-layer views, the
KV pool and the request pool; we keep those and put our allocation policy behind its two
allocators.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_memory_pool import UnifiedPoolBundle, _reserved_floor_bytes
from sglang.srt.runtime_context import get_memory, get_parallel

from mempool import Geometry
from sgl_kimi_k3 import compat, hooks
from sgl_kimi_k3.arena import Arena
from sgl_kimi_k3.config import BACKEND
from sgl_kimi_k3.pool_adapter import ArenaAllocator
from sgl_kimi_k3.rows import RequestRows
from sgl_kimi_k3.slots import StateSlotAllocator
from sgl_kimi_k3.windows import windows_of

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def around_factory(original: Callable[..., UnifiedPoolBundle], **kwargs: Any) -> UnifiedPoolBundle:
    """AROUND `unified_memory_pool.init_unified_mamba_pools`: ours where the tree is ours."""
    if get_memory().radix_cache_backend != BACKEND:
        return original(**kwargs)
    return build_pools(original, **kwargs)


def build_pools(factory: Callable[..., UnifiedPoolBundle], **kwargs: Any) -> UnifiedPoolBundle:
    """Run SGLang's factory, then put our arena behind its allocators.

    Returns the factory's bundle with the allocators exchanged.
    """
    # Stock would take a state for every token of a window beside the arena.
    window = kwargs.pop("speculative_num_draft_tokens", None)
    bundle = factory(**kwargs, speculative_num_draft_tokens=None)
    buffer = bundle.unified_memory_pool
    kv, state = buffer.spec("full"), buffer.spec("mamba")
    page_rows = kwargs["page_size"]
    geometry = Geometry(
        total_bytes=buffer.total_bytes,
        state_bytes=state.entry_bytes(),
        block_bytes=kv.entry_bytes() * page_rows,
        block_size=page_rows * get_parallel().attn_dcp_size,
        sink_bytes=_reserved_floor_bytes([kv, state], page_rows),
    )
    raw = buffer._raw  # noqa: SLF001  # SGLang offers no accessor
    if raw.is_cuda:
        compat.check_symbols(compat.PASS_SYMBOLS)
        hooks.apply(hooks.PASS_HOOKS)
    arena = Arena(raw, geometry, forward_stream(on_gpu=raw.is_cuda, **kwargs))
    token_to_kv_pool, rows = bundle.token_to_kv_pool, bundle.req_to_token_pool
    slots = StateSlotAllocator(arena, rows.mamba_pool.size)
    rows = RequestRows(rows, geometry.block_size, windows_of(window, **kwargs))
    allocator = ArenaAllocator(
        arena=arena,
        slots=slots,
        rows=rows,
        unified_buffer=buffer,
        kvcache=token_to_kv_pool,
        dtype=kv.get_dtype(),
        need_sort=kwargs["need_sort"],
    )
    rows.mamba_allocator = slots
    rows.mamba_pool.host_transfer_translate = slots.translate
    token_to_kv_pool._mamba_translate = slots.translate  # noqa: SLF001  # as the factory does
    token_to_kv_pool.full_kv_pool.host_transfer_translate = allocator.translate_kv_loc
    logger.info(
        "kimi_k3 arena: %d bytes; a state is %d bytes, a block of %d token(s) %d bytes; "
        "%d states or %d blocks fit",
        geometry.total_bytes,
        geometry.state_bytes,
        geometry.block_size,
        geometry.block_bytes,
        geometry.max_states,
        geometry.max_blocks,
    )
    return bundle._replace(token_to_kv_pool_allocator=allocator, req_to_token_pool=rows)


def forward_stream(
    *, on_gpu: bool, disable_overlap_schedule: bool, forward_stream: Any = None, **_: Any
) -> Any:
    """Where forwards run: a stream of their own under overlap, else the scheduler's (None)."""
    return forward_stream if on_gpu and not disable_overlap_schedule else None
