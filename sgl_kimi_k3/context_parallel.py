"""Decode context parallelism (DCP): a KV cache whose tokens lie one in `--dcp-size` on each rank.

What is refused at launch, and the one place where SGLang's own DCP code takes for granted that a
prefix ends at a page of all ranks.  Ours ends at any token, so that a turn resumes where the one
before ended.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of
from sglang.srt.arg_groups.overrides import resolving_view

from sgl_kimi_k3.config import (
    BACKEND,
    FULL_K3,
    K3_SPREAD_PAGES,
    PREFIX,
    SPREAD_KERNEL,
    Options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from sglang.srt.layers.dcp.metadata import DecodeContextParallelMetadata

# SGLang 0.5.23 arg_groups/kv_cache_hook.py, _validate_unified_memory_dcp.
READS_SPREAD_ROWS = ("flashinfer", "trtllm_mla", "cutedsl_mla")
K3_DECODE = "cutedsl_mla"
PAGE_SIZES = (1, 64)


def check(view: Any, architectures: Sequence[str]) -> dict[str, Any]:
    """What `--dcp-size` of more than one rank implies for flags that were not given.

    Called while flags are resolved, before SGLang's own rules.

    Raises:
        ValueError: the ranks, the class, the GPU or a kernel cannot do it; names the nearest that
            can.
    """
    ranks = view.dcp_size or 1
    if ranks == 1:
        return {}
    group = view.tp_size // max(view.attn_dp_size, 1)
    if group % ranks:
        among = f" over --attn-dp-size {view.attn_dp_size}" if view.attn_dp_size > 1 else ""
        fits = [str(size) for size in range(2, group + 1) if group % size == 0]
        use = f"Use --dcp-size {' or '.join(fits)}" if fits else "Drop --dcp-size"
        raise ValueError(
            f"--dcp-size {ranks} does not divide the {group} rank(s) of one attention group "
            f"(--tp-size {view.tp_size}{among}). {use}."
        )
    if view.device == "cpu":
        return {}  # the portable model gathers rows by itself
    backends = {one for one in attention_backends_of(view) if one is not None}
    if FULL_K3 in architectures:
        _check_k3(view, ranks)
        return {}  # SGLang sets both kernels
    unfit = sorted(backends - set(READS_SPREAD_ROWS))
    if unfit:
        raise ValueError(
            f"--attention-backend {unfit[0]} cannot read a KV cache that is spread over --dcp-size "
            f"{ranks} ranks. Use --attention-backend {SPREAD_KERNEL}, or drop --dcp-size."
        )
    return {} if backends else {"attention_backend": SPREAD_KERNEL}


def _check_k3(view: Any, ranks: int) -> None:
    from sglang.srt.runtime_context import get_platform  # noqa: PLC0415  # asks the driver

    _, decode = attention_backends_of(view)
    if decode not in (None, K3_DECODE):
        raise ValueError(
            f"--attention-backend {decode} cannot decode {FULL_K3} under --dcp-size {ranks}. "
            f"Use --decode-attention-backend {K3_DECODE}, or drop the flag: SGLang sets it."
        )
    platform = get_platform()
    if not platform.is_sm100:
        raise ValueError(
            f"--dcp-size {ranks} of {FULL_K3} needs a Blackwell (SM100): SGLang decodes it with "
            f"{K3_DECODE}, and this GPU is SM{platform.device_sm}. Drop --dcp-size; "
            "--attn-dp-size spreads requests over replicas instead (launch/dp_attention.sh)."
        )


def check_sizes(view: Any) -> None:
    """Raise ValueError unless the grid, and each prefill chunk, are made of pages of all ranks."""
    page_size, ranks, chunk = view.page_size, view.dcp_size, view.chunked_prefill_size
    few = {"trtllm_mla", K3_DECODE} & set(attention_backends_of(view))
    sizes = K3_SPREAD_PAGES if few else PAGE_SIZES
    check_page_size(page_size, Options.from_env(os.environ).grid, ranks, sizes)
    page = page_size * ranks
    if chunk is not None and chunk > 0 and chunk % page:
        raise ValueError(
            f"--chunked-prefill-size leaves {chunk} tokens to a prefill of one replica, which is "
            f"not made of pages of {page} (--page-size {page_size} on --dcp-size {ranks} ranks). "
            f"Set it to a multiple, such as {-(-chunk // page) * page} a replica."
        )


def check_page_size(
    page_size: int, grid: int, dcp: int = 1, sizes: Sequence[int] = PAGE_SIZES
) -> None:
    """Raise ValueError unless the states' grid is made of whole pages.

    Under DCP a page of the tree is one page of each of `dcp` ranks.  `sizes` are those to suggest.
    """
    page = page_size * dcp
    if grid % page:
        spread = f" over --dcp-size {dcp} is {page} tokens and" if dcp > 1 else ""
        fits = " or ".join(str(size) for size in sizes if grid % (size * dcp) == 0)
        use = f"Use --page-size {fits}, or set" if fits else "Set"
        raise ValueError(
            f"--page-size {page_size}{spread} does not divide {PREFIX}GRID={grid}, but states on "
            f"the grid stand at page ends. {use} {PREFIX}GRID={-(-grid // page) * page}."
        )


def validate(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `kv_cache_hook._validate_unified_memory_dcp`: the last word, on resolved flags.

    By now SGLang has chosen kernels and page size, and divided the chunk among replicas.  Its own
    list of kernels leaves out the CPU's.
    """
    view = resolving_view(server_args)
    if view.radix_cache_backend == BACKEND:
        check_sizes(view)
        if view.device == "cpu":
            return
    original(server_args)


def make_groups(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND `parallel_state.initialize_model_parallel`: DCP groups on a CPU, too.

    SGLang has kernels for none, and says so here; a group of CPU ranks itself is like any other.
    """
    from sglang.srt.distributed import parallel_state  # noqa: PLC0415
    from sglang.srt.runtime_context import get_memory, get_parallel  # noqa: PLC0415

    ours = get_memory().radix_cache_backend == BACKEND
    if not ours or get_parallel().attn_dcp_size == 1 or parallel_state.is_cuda():
        original(*args, **kwargs)
        return
    asked = parallel_state.is_cuda
    parallel_state.is_cuda = lambda: True  # only that refusal asks it
    try:
        original(*args, **kwargs)
    finally:
        parallel_state.is_cuda = asked


def prefix_metadata(
    original: Callable[..., DecodeContextParallelMetadata | None], **batch: Any
) -> DecodeContextParallelMetadata | None:
    """AROUND `planner.prepare_decode_context_parallel_metadata`: prefixes that end anywhere.

    Stock takes every `dcp`-th id of all prefixes laid end to end, which are those of this rank
    only where each prefix but the last is a multiple of `dcp` long.
    """
    metadata = original(**batch)
    lengths = batch["extend_prefix_lens_cpu"]
    if metadata is None or not any(lengths):
        return metadata
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    if any(length % get_parallel().dcp_size for length in lengths[:-1]):
        metadata.dcp_local_prefix_kv_indices = local_rows(**batch)
    return metadata


def local_rows(
    *,
    extend_prefix_lens: torch.Tensor,
    extend_prefix_lens_cpu: Sequence[int],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    create_chunked_prefix_cache_kv_indices_fn: Any,
    **_: Any,
) -> torch.Tensor:
    """This rank's rows of every prefix, one request behind the other: int64.

    Args:
        extend_prefix_lens: lengths of the prefixes, int [B] on the device.
        extend_prefix_lens_cpu: the same on the host.
        req_pool_indices: the requests' rows of `req_to_token`, int [B].
        req_to_token: token ids, int32 [rows, tokens].
        create_chunked_prefix_cache_kv_indices_fn: SGLang's kernel that lays ids end to end.
    """
    import torch  # noqa: PLC0415  # launching needs none of this
    from sglang.srt.layers.dcp.layout import filter_dcp_local_chunk_kv_indices  # noqa: PLC0415
    from sglang.srt.model_executor.forward_context import get_attn_backend  # noqa: PLC0415

    device, count = req_to_token.device, len(extend_prefix_lens_cpu)
    starts = torch.zeros(count, dtype=torch.int32, device=device)
    behind = torch.cumsum(extend_prefix_lens, 0, dtype=torch.int32)
    ids = torch.empty(sum(extend_prefix_lens_cpu), dtype=torch.int32, device=device)
    create_chunked_prefix_cache_kv_indices_fn[(count,)](
        *(req_to_token, req_pool_indices, starts, extend_prefix_lens),
        *(behind - extend_prefix_lens, ids, req_to_token.shape[1]),
    )
    lengths = torch.tensor(extend_prefix_lens_cpu)
    held = filter_dcp_local_chunk_kv_indices(ids, torch.zeros_like(lengths), lengths)
    return get_attn_backend().kv_index_translator.translate_dcp_read_ids(held)
