"""From SGLang's build context to our cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel, mamba_cache_chunk_size

from sgl_kimi_k3 import hooks
from sgl_kimi_k3.boundaries import BoundaryRule
from sgl_kimi_k3.cache_adapter import KimiK3Cache
from sgl_kimi_k3.compat import IncompatibleError
from sgl_kimi_k3.config import PREFIX, Options
from sgl_kimi_k3.context_parallel import check_page_size
from sgl_kimi_k3.models import is_portable
from sgl_kimi_k3.pool_adapter import ArenaAllocator
from sgl_kimi_k3.trace import TraceWriter

if TYPE_CHECKING:
    from sgl_kimi_k3.rows import RequestRows

logger = logging.getLogger(__name__)


def build_cache(context: Any, options: Options) -> KimiK3Cache:
    """Build the cache of one scheduler process.

    Args:
        context: SGLang's `TreeCacheBuildContext`.
        options: our options.

    Raises:
        ValueError: the model has no recurrent state, or the pool is not ours.
    """
    params = context.params
    if not context.is_hybrid_ssm:
        raise ValueError(
            f"--radix-cache-backend kimi_k3 serves hybrid KDA models; "
            f"{context.model_config.hf_config.architectures} has no recurrent state. "
            "Drop --radix-cache-backend."
        )
    allocator = params.token_to_kv_pool_allocator
    if not isinstance(allocator, ArenaAllocator):
        raise ValueError(  # noqa: TRY004  # a wrong set of flags, not a wrong type in a call
            "--radix-cache-backend kimi_k3 needs its own pool, but SGLang built "
            f"{type(allocator).__name__}: pass --enable-unified-memory"
        )
    check_page_size(params.page_size, options.grid)
    _check_windows(params.req_to_token_pool, context.model_config.dtype)
    _check_model(context.model_config.hf_config.architectures)
    _warn_if_inert(options, context.model_config.context_len)
    rule = _boundary_rule(context.server_args) if options.boundaries == "auto" else None
    trace = _trace(options)
    logger.info("kimi_k3 cache: %s; message boundaries %s", options, "on" if rule else "off")
    kernel_chunk = _kernel_chunk(allocator, context.server_args)
    if kernel_chunk:
        _warm_up_pass(params.req_to_token_pool, context.model_config.dtype)
    if get_parallel().attn_dcp_size > 1 and allocator.device.type == "cuda":
        hooks.apply(hooks.SPREAD_HOOKS)
    return KimiK3Cache(
        params,
        options,
        rule=rule,
        kernel_chunk=kernel_chunk,
        track_interval=resolving_view(context.server_args).mamba_track_interval,
        trace=trace,
    )


def _check_windows(rows: RequestRows, dtype: torch.dtype) -> None:
    """Refuse draft windows that would round what a step is fed."""
    kept = dtype if rows.windows is None else rows.windows.dtype
    if kept.itemsize < dtype.itemsize:
        raise ValueError(
            f"--speculative-algorithm NGRAM keeps inputs of {dtype} in the type of the "
            f"convolution's rows, {kept}. Drop SGLANG_MAMBA_CONV_DTYPE, or serve in that type."
        )


def _check_model(architectures: list[str]) -> None:
    """Refuse stock's class where the portable one should serve.

    SGLang logs a model package that fails to import and takes its own class without a word.
    """
    if not is_portable():
        return
    model, _ = ModelRegistry.resolve_model_cls(architectures)
    if not model.__module__.startswith("sgl_kimi_k3."):
        raise IncompatibleError(
            f"SGLang resolved {architectures} to {model.__module__} instead of the portable model: "
            "see its log above for the import that failed"
        )


def _kernel_chunk(allocator: ArenaAllocator, server_args: Any) -> int:
    """Chunk of the KDA prefill kernel if ours can stand in for its walk (`state_pass`), else 0."""
    view = resolving_view(server_args)
    kernel = view.linear_attn_prefill_backend or view.linear_attn_backend
    on_gpu = allocator.device.type == "cuda"
    return mamba_cache_chunk_size() if on_gpu and kernel == "triton" else 0


def _warm_up_pass(rows: RequestRows, dtype: torch.dtype) -> None:
    """Compile the kernel that writes states inside a pass, for any layer of this model.

    A forward names states as SGLang's backend does: by rows of the batch, translated.
    """
    from sgl_kimi_k3 import state_pass  # noqa: PLC0415  # Triton: where a GPU is

    states = rows.mamba_pool.mamba_cache.temporal[0]
    batch = torch.zeros(1, dtype=torch.int64, device=states.device)
    named = rows.translate_mamba_indices(rows.get_mamba_indices(batch))
    state_pass.warm_up(states, dtype, named.dtype)


def _trace(options: Options) -> TraceWriter | None:
    """One rank of an attention group records, as all of them see the same requests.

    Under DP attention each group has a cache and so a file of its own: `x.jsonl` is `x.dp1.jsonl`.
    """
    parallel = get_parallel()
    if not options.trace or parallel.attn_tp_rank:
        return None
    path = Path(options.trace)
    if parallel.attn_dp_size > 1:
        path = path.with_name(f"{path.stem}.dp{parallel.attn_dp_rank}{path.suffix}")
    return TraceWriter(str(path), options.grid)


def _warn_if_inert(options: Options, context_len: int) -> None:
    """Say which option keeps no state because no prompt is that long; loudly if it was chosen."""
    for name in ("interval", "grid"):
        value = getattr(options, name)
        if value >= context_len:
            chosen = value != getattr(Options(), name)
            logger.log(
                logging.WARNING if chosen else logging.INFO,
                "%s%s=%d is not below the context length of %d tokens: no state is kept because "
                "of it, only where prompts and turns end. Lower it.",
                PREFIX,
                name.upper(),
                value,
                context_len,
            )


def _boundary_rule(server_args: Any) -> BoundaryRule | None:
    """The message rule, where the server has a tokenizer with K3's control tokens."""
    if server_args.skip_tokenizer_init:
        return None
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer  # noqa: PLC0415  # slow

    tokenizer = get_tokenizer(
        server_args.tokenizer_path or server_args.model_path,
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )
    return BoundaryRule.of(tokenizer)
