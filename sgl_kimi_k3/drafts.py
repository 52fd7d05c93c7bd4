"""Speculative decoding: what drafts ask of SGLang's flags, of the pool and of a request's end.

Drafts come from SGLang's n-gram corpus (`--speculative-algorithm NGRAM`), which needs no model.  A
step verifies a window per request: its last known token and a chain of drafts.  Their KV rows lie
behind the committed ones, in blocks that are the request's own; KDA keeps what the steps were fed
(`windows`) and advances the live state by the accepted ones only.  So between two steps a request
looks as it does without drafts, its live state and `kv_committed_len` at the same depth, except
that blocks behind it are allocated.  What of them was not accepted is overwritten by the next
window, and freed at the end.
"""

from __future__ import annotations

import os
import shutil
from sysconfig import get_path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule, get_spec

from sgl_kimi_k3.config import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req

SOURCE = "sgl_kimi_k3"
STOCK_BREADTH = 10  # SGLang's default of --speculative-ngram-max-bfs-breadth


# -- flags --


def check(view: Any) -> dict[str, Any]:
    """What drafts imply for other flags; nothing without them.

    Raises:
        ValueError: naming what cannot work, why, and the nearest that does.
    """
    if view.speculative_algorithm is None:
        return {}
    if view.speculative_algorithm.upper() != "NGRAM":
        raise ValueError(
            f"--radix-cache-backend {BACKEND} does not support --speculative-algorithm "
            f"{view.speculative_algorithm}: a draft model's own KV has no place in the arena. "
            "Use --speculative-algorithm NGRAM, which drafts from the text so far, or drop the "
            "flag."
        )
    breadth = view.speculative_ngram_max_bfs_breadth
    if breadth not in (1, STOCK_BREADTH):
        raise ValueError(
            f"--speculative-ngram-max-bfs-breadth {breadth} drafts a tree, and only a chain can be "
            f"replayed under --radix-cache-backend {BACKEND}. Drop it, or set it to 1."
        )
    for flag, value in (("--dcp-size", view.dcp_size), ("--attn-dp-size", view.attn_dp_size)):
        if value > 1:
            raise ValueError(
                f"{flag} {value} with --speculative-algorithm NGRAM has not been run. "
                "Drop one of them."
            )
    _find_compiler()
    return {
        "speculative_ngram_max_bfs_breadth": 1,
        # The depth of the live state must be known when a request ends, and the corpus waits for
        # every step's tokens in any case.
        "disable_overlap_schedule": True,
        # This is how states are kept here; SGLang's flag would size rings for every cached state.
        "enable_linear_replayssm_spec": False,
        "linear_attn_verify_backend": "triton",
    }


def _find_compiler() -> None:
    """SGLang compiles its corpus at start; ninja may be the environment's, not the system's."""
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), get_path("scripts")))
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool) is None:
            raise ValueError(
                f"--speculative-algorithm NGRAM: SGLang compiles its n-gram corpus at start, and "
                f"{tool} is missing: apt install g++ ninja-build. Or drop the flag."
            )


def unified_memory(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `kv_cache_hook.handle_unified_memory_pool`: drafts of a chain without a model pass.

    Stock refuses n-gram drafts because accepted rows of a tree are moved by virtual id. Those of a
    chain lie where they belong.
    """
    view = resolving_view(server_args)
    algorithm = view.speculative_algorithm
    if view.radix_cache_backend != BACKEND or algorithm is None:
        original(server_args)
        return
    declare_resolution(server_args, SOURCE, speculative_algorithm=None)
    try:
        original(server_args)
    finally:
        declare_resolution(server_args, SOURCE, speculative_algorithm=algorithm)


# -- memory --


def window_tokens() -> int:
    """Steps of a window; 0 without drafts."""
    spec = get_spec()
    return int(spec.speculative_num_draft_tokens) if spec.speculative_algorithm else 0


def state_budget(original: Callable[..., float], configurator: Any, rest_gib: float) -> float:
    """AROUND `KVCacheConfigurator._handle_max_mamba_cache`: windows, not a state for every draft.

    Takes and returns GiB that are left.
    """
    if get_memory().radix_cache_backend != BACKEND or configurator.spec_algorithm.is_none():
        return original(configurator, rest_gib)
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: PLC0415  # slow

    from sgl_kimi_k3.windows import window_bytes  # noqa: PLC0415  # imports torch

    params = configurator.mambaish_config.mamba2_cache_params
    requests = get_schedule().max_running_requests // get_parallel().attn_dp_size
    taken = requests * window_bytes(params, layers=len(params.layers), tokens=window_tokens())
    algorithm, configurator.spec_algorithm = configurator.spec_algorithm, SpeculativeAlgorithm.NONE
    try:
        return original(configurator, rest_gib - taken / (1 << 30))
    finally:
        configurator.spec_algorithm = algorithm


def reserve(original: Callable[[], int]) -> int:
    """AROUND `get_alloc_reserve_per_decode`: the tokens of one window.

    Stock doubles them for the step that overlap scheduling keeps in flight, and a row of its
    table does not hold that much behind the context length.
    """
    return original() // 2 if get_memory().radix_cache_backend == BACKEND else original()


def allocate(
    original: Callable[..., None], tree_cache: Any, req_to_token_pool: Any, **kwargs: Any
) -> None:
    """AROUND `alloc_for_spec_decode`: the host copy of the rows learns of the blocks."""
    original(tree_cache, req_to_token_pool, **kwargs)
    if get_memory().radix_cache_backend == BACKEND:
        req_to_token_pool.alloc_aux_to_lengths(
            req_pool_indices_cpu=kwargs["batch"].req_pool_indices_cpu,
            target_seq_lens_cpu=kwargs["nxt_kv_lens_cpu"],
        )


# -- a step --


def verify(
    original: Callable[..., Any],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Any,
    a: Any,
    b: Any,
) -> Any:
    """AROUND `KDAAttnBackend._forward_target_verify` (CUDA): no state for each draft.

    Stock's kernels, which here write neither states nor rows: what their steps are fed is kept.
    """
    pool = backend.req_to_token_pool
    windows = getattr(pool, "windows", None)
    if windows is None:
        return original(backend, layer, forward_batch, mixed_qkv, a, b)
    from sglang.srt.layers.attention.linear.kda_backend import (  # noqa: PLC0415  # loaded by now
        causal_conv1d_update,
    )

    found = backend.forward_metadata
    requests = len(mixed_qkv) // windows.tokens
    cache = pool.mamba2_layer_cache(layer.layer_id)
    # A copy, as the kernel leaves the rows behind the last draft; padding (-1) reads the sink's.
    rows = cache.conv[0][found.mamba_cache_indices[:requests].clamp(min=0).long()]
    convolved = causal_conv1d_update(
        mixed_qkv.view(requests, windows.tokens, -1).transpose(1, 2),
        rows.transpose(1, 2),
        layer.conv_weights,
        layer.bias,
        activation="silu",
    )
    parts = convolved.transpose(1, 2).reshape(len(mixed_qkv), -1)
    q, k, v = parts.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
    q, k, v = (
        part.unflatten(-1, (-1, size))[None]
        for part, size in ((q, layer.head_q_dim), (k, layer.head_k_dim), (v, layer.head_v_dim))
    )
    index = pool.mamba_map[layer.layer_id]
    windows.keep(index, layer, mixed=mixed_qkv, k=k, v=v, a=a, b=b)
    return backend.kernel_dispatcher.triton_kernel.target_verify(
        layer.A_log,
        layer.dt_bias,
        q,
        k,
        v,
        a,
        b,
        ssm_states=cache.temporal,
        cache_indices=found.mamba_cache_indices,
        query_start_loc=found.query_start_loc,
        intermediate_states_buffer=None,
        intermediate_state_indices=None,
        cache_steps=windows.tokens,
        retrieve_parent_token=None,
        lower_bound=layer.lower_bound,
    )


def commit(
    original: Callable[..., None],
    backend: Any,
    last_correct_step_indices: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """AROUND `HybridLinearAttnBackend.update_mamba_state_after_mtp_verify`: replay what counts."""
    linear = backend.linear_attn_backend
    windows = getattr(linear.req_to_token_pool, "windows", None)
    if windows is None:
        original(backend, last_correct_step_indices, *args, **kwargs)
        return
    requests = len(last_correct_step_indices)
    windows.fold(
        linear.req_to_token_pool.mamba_pool.mamba_cache,
        linear.forward_metadata.mamba_cache_indices[:requests].long(),
        last_correct_step_indices + 1,
    )


def keep_in_place(original: Callable[..., None], batch: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `move_accept_tokens_to_target_kvcache`: rows of a chain are where they belong."""
    if get_memory().radix_cache_backend != BACKEND:
        original(batch, *args, **kwargs)


def may_keep(original: Callable[..., bool], processor: Any, req: Req, *args: Any) -> bool:
    """AROUND `_mamba_can_cache_finished_req`: an end inside an accepted window still leaves KV.

    Stock keeps nothing of such a request, as its live state is deeper than its text.  `Handover`
    knows, and publishes what is on the way there.
    """
    from sgl_kimi_k3.scheduler import is_ours  # noqa: PLC0415  # loaded by now

    inside = req.owned_kv_len() != req.kv.kv_committed_len
    return (inside and is_ours(processor.tree_cache)) or original(processor, req, *args)


# -- the worker --


def create_worker(original: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """AROUND `SpeculativeAlgorithm.create_worker`, in the scheduler: ours, and its hooks."""
    if resolving_view(server_args).radix_cache_backend != BACKEND:
        return original(algorithm, server_args)
    from sgl_kimi_k3 import compat, hooks  # noqa: PLC0415
    from sgl_kimi_k3.models import is_portable  # noqa: PLC0415

    if not torch.cuda.is_available():
        from sgl_kimi_k3.attention import chains  # noqa: PLC0415

        chains.install()
    if not is_portable():
        compat.check_symbols(compat.VERIFY_SYMBOLS)
        hooks.apply(hooks.VERIFY_HOOKS)
    compat.check_symbols(compat.DRAFT_SYMBOLS)
    hooks.apply(hooks.DRAFT_HOOKS)
    from sgl_kimi_k3.draft_worker import ChainWorker  # noqa: PLC0415

    return ChainWorker
