"""Every place where SGLang is hooked, in one table; and the proof at start that each hook took.

SGLang logs a hook that fails to apply and carries on with stock code, so the cache factory calls
`verify` and refuses to start unless every target is really wrapped.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, slots=True)
class Hook:
    """One AROUND hook: `wrapper` (module:function of ours) wraps `target`.

    Attributes:
        target: dotted path in SGLang.
        wrapper: ours; imported when first called, so that processes without the need stay light.
        why: what stock does there that the backend must change.
    """

    target: str
    wrapper: str
    why: str


HOOKS = (
    Hook(
        "sglang.srt.arg_groups.platform_hook.handle_cpu_backends",
        "sgl_kimi_k3.resolution:resolve",
        "the backend's flag implies others; unsupported ones are refused by name",
    ),
    Hook(
        "sglang.srt.arg_groups.kv_cache_hook.handle_page_major_kv_layout",
        "sgl_kimi_k3.resolution:page_major_layout",
        "stock's list of kernels leaves out the CPU's",
    ),
    Hook(
        "sglang.srt.arg_groups.kv_cache_hook._validate_unified_memory_dcp",
        "sgl_kimi_k3.context_parallel:validate",
        "pages of all ranks must fit the grid and the chunk; stock's list leaves out the CPU",
    ),
    Hook(
        "sglang.srt.arg_groups.kv_cache_hook.handle_unified_memory_pool",
        "sgl_kimi_k3.drafts:unified_memory",
        "stock's list of speculative algorithms leaves out the one without a model",
    ),
    Hook(
        "sglang.srt.arg_groups.mamba_hook.validate_mamba_no_buffer",
        "sgl_kimi_k3.resolution:validate_no_buffer",
        "one live state per request and no tracking slots work under overlap here",
    ),
    Hook(
        "sglang.srt.distributed.parallel_state.initialize_model_parallel",
        "sgl_kimi_k3.context_parallel:make_groups",
        "stock makes no group for a spread KV cache on a CPU",
    ),
    Hook(
        "sglang.srt.mem_cache.unified_memory_pool.init_unified_mamba_pools",
        "sgl_kimi_k3.pools:around_factory",
        "our arena behind SGLang's allocators",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
        "sgl_kimi_k3.scheduler:max_running_requests",
        "stock caps concurrency by a static number of states per request",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache",
        "sgl_kimi_k3.drafts:state_budget",
        "stock reserves a state for every draft token",
    ),
    Hook(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        "sgl_kimi_k3.drafts:create_worker",
        "drafts are a chain, and their states are replayed",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "sgl_kimi_k3.gate:new_prefill",
        "admitting in order under overload evicts what those will need that come back next",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_prefill_adder_class",
        "sgl_kimi_k3.scheduler:prefill_adder_class",
        "chunks end where states are kept",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        "sgl_kimi_k3.scheduler:prepare_for_extend",
        "slots are taken for the states a forward will leave",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        "sgl_kimi_k3.scheduler:prepare_for_decode",
        "so they are for those that an answer leaves on its way",
    ),
    Hook(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "sgl_kimi_k3.scheduler:forward",
        "those states are copied right behind the forward",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.release_req",
        "sgl_kimi_k3.scheduler:release_retracted",
        "a retracted request leaves its latest state",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
        "sgl_kimi_k3.scheduler:abort_unfinished",
        "an aborted prefill leaves what it computed",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        "sgl_kimi_k3.scheduler:update_running_batch",
        "retraction waits for the step in flight; an unfinished prefill gives way first",
    ),
    Hook(
        "sglang.srt.managers.data_parallel_controller.DataParallelController"
        ".maybe_external_dp_rank_routing",
        "sgl_kimi_k3.replicas:route",
        "each replica has its own cache, and stock deals conversations out in turn",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "sgl_kimi_k3.live:internal_state",
        "`/server_info` shows what the cache counted and what the arena holds",
    ),
)

# Applied by the pools' factory on a GPU, before SGLang captures graphs: the KDA prefill writes
# states inside a pass.  Their targets take seconds to import and no other process needs them.
PASS_HOOKS = (
    Hook(
        "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend.init_forward_metadata",
        "sgl_kimi_k3.state_pass:metadata",
        "the convolution's rows of any number of states, not one a request",
    ),
    Hook(
        "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend"
        "._fill_prefill_graph_metadata",
        "sgl_kimi_k3.prefill_graphs:fill",
        "the same for a prefill that a graph replays",
    ),
    Hook(
        "sglang.srt.layers.attention.linear.kda_backend.kda_extend_in_graph",
        "sgl_kimi_k3.prefill_graphs:extend",
        "a captured layer writes them",
    ),
    Hook(
        "sglang.kernels.ops.attention.fla.kda.chunk_gated_delta_rule_fwd_h",
        "sgl_kimi_k3.prefill_graphs:chunk_states",
        "a prefill pass that writes any number of states",
    ),
)

# Applied by the cache's factory, where tokens are spread over GPUs (DCP): both models had imported
# it by name before.
SPREAD_HOOKS = tuple(
    Hook(
        f"sglang.srt.models.{model}.prepare_decode_context_parallel_metadata",
        "sgl_kimi_k3.context_parallel:prefix_metadata",
        "a prefix may end inside a page of all ranks",
    )
    for model in ("kimi_linear", "kimi_k3")
)

# Applied by the scheduler where it drafts, before it makes its pools.
DRAFT_HOOKS = (
    *(
        Hook(
            f"sglang.srt.{module}.get_alloc_reserve_per_decode",
            "sgl_kimi_k3.drafts:reserve",
            "no step is in flight when the next window is allocated",
        )
        for module in ("managers.schedule_batch", "speculative.eagle_utils")
    ),
    Hook(
        "sglang.srt.speculative.eagle_utils.alloc_for_spec_decode",
        "sgl_kimi_k3.drafts:allocate",
        "the host copy of the rows learns of a window's blocks",
    ),
    Hook(
        "sglang.srt.speculative.ngram_worker.move_accept_tokens_to_target_kvcache",
        "sgl_kimi_k3.drafts:keep_in_place",
        "stock moves rows by virtual id; a chain's are where they belong",
    ),
    Hook(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
        ".update_mamba_state_after_mtp_verify",
        "sgl_kimi_k3.drafts:commit",
        "accepted steps are replayed from their inputs; there is no state for each",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._mamba_can_cache_finished_req",
        "sgl_kimi_k3.drafts:may_keep",
        "stock keeps nothing of a request that ends inside an accepted window",
    ),
)

# And where SGLang's own KDA verifies.
VERIFY_HOOKS = (
    Hook(
        "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend._forward_target_verify",
        "sgl_kimi_k3.drafts:verify",
        "the inputs of a window's steps are kept, not the state after each",
    ),
)

_MARK = "__sgl_kimi_k3_hook__"


def register() -> None:
    """Register all hooks with SGLang's registry (they are applied after every plugin has run)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for hook in HOOKS:
        HookRegistry.register(hook.target, _lazy(hook.wrapper), HookType.AROUND)


def apply(hooks: Iterable[Hook]) -> None:
    """Wrap the targets at once, without SGLang's registry; idempotent."""
    for hook in hooks:
        original = pkgutil.resolve_name(hook.target)
        if not _wrapped(original, hook):
            owner, name = hook.target.rsplit(".", 1)
            setattr(pkgutil.resolve_name(owner), name, _around(original, _lazy(hook.wrapper)))


def _around(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


def missing() -> list[str]:
    """Targets that are not wrapped by us."""
    return [hook.target for hook in HOOKS if not _wrapped(pkgutil.resolve_name(hook.target), hook)]


def _lazy(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    found: Callable[..., Any] | None = None

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = getattr(importlib.import_module(module), name)
        return found(original, *args, **kwargs)

    setattr(wrapper, _MARK, path)
    return wrapper


def _wrapped(function: Any, hook: Hook) -> bool:
    """Whether one of the closures around `function` is ours for this hook."""
    pending = [function]
    seen = 0
    while pending and seen < 32:  # deeper than any chain of plugins
        seen += 1
        current = pending.pop()
        if getattr(current, _MARK, None) == hook.wrapper:
            return True
        cells = getattr(current, "__closure__", None) or ()
        pending += [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        if hasattr(current, "__wrapped__"):
            pending.append(current.__wrapped__)
    return False
