"""The SGLang this backend was written against: version, symbols and signatures.

A mismatch is one error that names it.  The signature table is checked by a test against the
installed wheel, so an SGLang upgrade starts here.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SGLANG_VERSION = "0.5.23"
DISTRIBUTION = "sgl-kimi-k3"

# Dotted name -> parameter names we rely on, in order (None: any callable or class will do).
SYMBOLS: dict[str, tuple[str, ...] | None] = {
    "sglang.srt.plugins.hook_registry.HookRegistry.register": (
        "target",
        "hook",
        "hook_type",
        "source",
    ),
    "sglang.srt.configs.mamba_utils.mamba2_state_dtype": ("config",),
    "sglang.srt.layers.attention.attention_registry.register_attention_backend": ("name",),
    "sglang.srt.models.registry.ModelRegistry": None,
    "sglang.srt.mem_cache.registry.register_radix_cache_backend": ("name", "factory"),
    "sglang.srt.arg_groups.overrides.declare_resolution": ("server_args", "source", "fields"),
    "sglang.srt.arg_groups.overrides.resolving_view": ("server_args",),
    "sglang.srt.arg_groups.platform_hook.handle_cpu_backends": ("server_args",),
    "sglang.srt.arg_groups.kv_cache_hook.handle_page_major_kv_layout": ("server_args",),
    "sglang.srt.arg_groups.kv_cache_hook._validate_unified_memory_dcp": ("server_args",),
    "sglang.srt.arg_groups.kv_cache_hook.handle_unified_memory_pool": ("server_args",),
    "sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer": ("view", "model_arch"),
    "sglang.srt.distributed.parallel_state.initialize_model_parallel": (
        "backend",
        "duplicate_tp_group",
        "enable_symm_mem",
        "recovered_rank",
        "rank_offset",
        "max_world_size",
    ),
    "sglang.srt.distributed.parallel_state.is_cuda": (),
    "sglang.srt.layers.dcp.layout.filter_dcp_local_chunk_kv_indices": (
        "kv_indices",
        "chunk_starts_cpu",
        "chunk_seq_lens_cpu",
    ),
    "sglang.srt.layers.dcp.planner.prepare_decode_context_parallel_metadata": (
        "seq_lens",
        "extend_prefix_lens",
        "extend_prefix_lens_cpu",
        "extend_seq_lens",
        "req_pool_indices",
        "req_to_token",
        "seq_lens_sum",
        "kv_buffer_shape",
        "kv_cache_dtype",
        "kv_cache_device",
        "create_chunked_prefix_cache_kv_indices_fn",
    ),
    "sglang.kernels.ops.memory.virtual_slot.translate_token_ids": (
        "loc",
        "v2p",
        "page_size",
        "dcp_size",
        "dcp_rank",
        "out",
        "out_width",
    ),
    "sglang.srt.mem_cache.unified_memory_pool.init_unified_mamba_pools": None,
    "sglang.srt.mem_cache.unified_memory_pool._reserved_floor_bytes": (
        "sub_pool_specs",
        "page_size",
    ),
    "sglang.srt.mem_cache.unified_memory_pool.UnifiedMambaSlotAllocator": None,
    "sglang.srt.mem_cache.unified_memory_pool.UnifiedPoolBundle": None,
    "sglang.srt.mem_cache.allocator.unified_mamba.UnifiedMambaTokenToKVPoolAllocator": None,
    "sglang.srt.mem_cache.allocator.paged.alloc_extend_naive": (
        "prefix_lens",
        "seq_lens",
        "last_loc",
        "free_pages",
        "out_indices",
        "page_size",
        "device",
    ),
    "sglang.srt.mem_cache.prefill_budget.PrefillBudget._available_and_evictable": ("self",),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs": (
        "self",
        "token_capacity",
    ),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache": (
        "self",
        "total_rest_memory",
    ),
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": ("self", "server_args"),
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.match_prefix": ("self", "params"),
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.checkpoint": (
        "self",
        "req",
        "up_to",
        "kwargs",
    ),
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.on_release": (
        "self",
        "req",
        "checkpointed",
    ),
    "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.free_kv_row": ("self", "kv", "ranges"),
    "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.free_mamba_cache": (
        "self",
        "req",
        "mamba_ping_pong_track_buffer_to_keep",
    ),
    "sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill": ("self", "running_batch"),
    "sglang.srt.managers.schedule_policy.CacheAgnosticPolicy.FCFS": None,
    "sglang.srt.managers.schedule_policy.SchedulePolicy": None,
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": ("self", "recv_req"),
    "sglang.srt.managers.data_parallel_controller.DataParallelController"
    ".maybe_external_dp_rank_routing": ("self", "req"),
    "sglang.srt.managers.data_parallel_controller.DPBudget.update_budget": ("self", "loads"),
    "sglang.srt.managers.data_parallel_controller.DataParallelController.refresh_load_budget": (
        "self",
    ),
    "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.update_running_batch": ("self", "batch"),
    "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue": (
        "self",
        "req",
        "is_retracted",
    ),
    "sglang.srt.managers.schedule_batch.retract_all": (
        "reqs",
        "req_to_token_pool",
        "token_to_kv_pool_allocator",
        "tree_cache",
        "hisparse_coordinator",
        "offload_kv",
    ),
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS": None,
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend": ("self",),
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode": ("self",),
    "sglang.srt.managers.schedule_batch.Req.refresh_fill_ids": ("self",),
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
        "self",
        "batch",
        "forward_batch",
        "pp_proxy_tensors",
        "is_verify",
        "skip_attn_backend_init",
        "capture_hidden_mode",
        "return_kv_loc_plan",
    ),
    "sglang.srt.model_executor.cuda_graph_config.with_phase": ("config", "phase", "changes"),
    "sglang.srt.managers.schedule_batch.release_req": (
        "req",
        "remaing_req_count",
        "req_to_token_pool",
        "token_to_kv_pool_allocator",
        "tree_cache",
        "hisparse_coordinator",
        "offload_kv",
    ),
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req": ("self", "req"),
    "sglang.srt.managers.schedule_policy.PrefillAdder._select_prefill_admission": (
        "self",
        "req",
        "total_tokens",
        "host_hit_length",
        "swa_host_hit_length",
        "truncation_align_size",
        "has_chunked_req",
    ),
    "sglang.srt.managers.schedule_policy.PrefillAdder._commit_prefill_admission": (
        "self",
        "req",
        "admission",
        "mamba_gap_reserve",
    ),
}

# The same for what only a server with a GPU imports: the KDA prefill writes states inside a pass.
PASS_SYMBOLS: dict[str, tuple[str, ...] | None] = {
    "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend.init_forward_metadata": (
        "self",
        "forward_batch",
    ),
    "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend._fill_prefill_graph_metadata": (
        "self",
        "meta",
        "forward_batch",
        "cache_indices",
    ),
    "sglang.srt.layers.attention.linear.kda_backend.kda_extend_in_graph": (
        "layer",
        "meta",
        "conv_pool",
        "ssm_states",
        "kernel_dispatcher",
        "mixed_qkv",
        "a",
        "b",
    ),
    "sglang.kernels.ops.mamba.kda_prefill_track.kda_track_conv_window": (
        "conv_pool",
        "x",
        "track_mode",
        "track_conv_start",
        "track_dst",
        "num_tokens",
    ),
    "sglang.kernels.ops.attention.fla.kda.chunk_gated_delta_rule_fwd_h": (
        "k",
        "w",
        "u",
        "g",
        "gk",
        "initial_state",
        "initial_state_indices",
        "save_new_value",
        "cu_seqlens",
        "chunk_indices",
        "use_exp2",
        "inplace_update",
        "track_state",
        "track_chunk_idx",
        "chunk_offsets",
    ),
}

# And for what only a server that drafts imports.
DRAFT_SYMBOLS: dict[str, tuple[str, ...] | None] = {
    "sglang.srt.managers.schedule_batch.get_alloc_reserve_per_decode": (),
    "sglang.srt.speculative.eagle_utils.get_alloc_reserve_per_decode": (),
    "sglang.srt.speculative.eagle_utils.alloc_for_spec_decode": (
        "tree_cache",
        "req_to_token_pool",
        "reqs",
        "req_pool_indices",
        "cur_kv_lens",
        "cur_kv_lens_cpu",
        "nxt_kv_lens",
        "nxt_kv_lens_cpu",
        "num_needed_tokens",
        "batch",
    ),
    "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens": ("self", "batch"),
    "sglang.srt.speculative.ngram_worker.move_accept_tokens_to_target_kvcache": (
        "batch",
        "accept_index",
        "num_correct_drafts",
        "token_to_kv_pool_allocator",
    ),
    "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
    ".update_mamba_state_after_mtp_verify": (
        "self",
        "last_correct_step_indices",
        "mamba_track_indices",
        "mamba_steps_to_track",
        "model",
        "req_pool_indices",
    ),
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._mamba_can_cache_finished_req": ("self", "req", "result", "i"),
}

# And for one whose KDA layers are SGLang's.
VERIFY_SYMBOLS: dict[str, tuple[str, ...] | None] = {
    "sglang.srt.layers.attention.linear.kda_backend.causal_conv1d_update": None,
    "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend._forward_target_verify": (
        "self",
        "layer",
        "forward_batch",
        "mixed_qkv",
        "a",
        "b",
    ),
    "sglang.srt.layers.attention.linear.kernels.kda_triton.TritonKDAKernel.target_verify": (
        "self",
        "A_log",
        "dt_bias",
        "q",
        "k",
        "v",
        "a",
        "b",
        "ssm_states",
        "cache_indices",
        "query_start_loc",
        "intermediate_states_buffer",
        "intermediate_state_indices",
        "cache_steps",
        "retrieve_parent_token",
        "lower_bound",
        "cache_ring",
        "replayssm_rawv",
        "replayssm_rawk",
        "replayssm_g",
        "replayssm_beta",
        "kwargs",
    ),
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"
    ".fused_sigmoid_gating_delta_rule_update": None,
}


class IncompatibleError(RuntimeError):
    """The installed SGLang is not the one this backend was written against."""


def check() -> None:
    """Raise IncompatibleError, in one line, unless the installed SGLang fits."""
    check_version()
    check_symbols()


def check_version() -> None:
    """Compare versions only; cheap, imports nothing of SGLang."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise IncompatibleError(
            f"{DISTRIBUTION} needs sglang {SGLANG_VERSION}, which is not installed: "
            f"pip install '{DISTRIBUTION}[serve]'"
        ) from None
    if found != SGLANG_VERSION:
        raise IncompatibleError(
            f"{DISTRIBUTION} needs sglang {SGLANG_VERSION}, found {found}: "
            f"pip install sglang=={SGLANG_VERSION}"
        )


def check_symbols(symbols: Mapping[str, tuple[str, ...] | None] = SYMBOLS) -> None:
    """Resolve every symbol and compare parameter names."""
    for name, expected in symbols.items():
        try:
            symbol = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise IncompatibleError(
                f"sglang {SGLANG_VERSION} lacks {name} ({error}): reinstall it"
            ) from error
        if expected is None:
            continue
        found = tuple(inspect.signature(symbol).parameters)
        if found != expected:
            raise IncompatibleError(f"{name} takes {found}, expected {expected}: reinstall sglang")


def check_own_packages() -> None:
    """`mempool` and `radix` are generic names: both must come from this distribution."""
    import mempool  # noqa: PLC0415  # only when a server really starts
    import radix  # noqa: PLC0415

    for package, member in ((mempool, "Pool"), (radix, "PrefixCache")):
        if not hasattr(package, member):
            raise IncompatibleError(
                f"the package {package.__name__!r} at {package.__path__} is not "
                f"{DISTRIBUTION}'s: uninstall the other distribution of that name"
            )
