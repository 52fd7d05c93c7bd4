"""What `--radix-cache-backend kimi_k3` implies for SGLang's other flags.

Decided while SGLang resolves its flags rather than in our command line alone, so that
`sglang serve` and `python -m sglang.launch_server` with that one flag behave the same.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view, resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sgl_kimi_k3 import context_parallel, drafts
from sgl_kimi_k3.config import BACKEND, Options
from sgl_kimi_k3.models import is_portable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

SOURCE = "sgl_kimi_k3"
SPLITS_OVER_ALL = "KimiLinearForCausalLM"
# Classes whose prefills have been served from CUDA graphs, and up to how many tokens: beyond, the
# GPU is busy for longer than the host launches.
GRAPHED = (
    "KimiLinearForCausalLM",
    "KimiK3LinearForCausalLM",
    "KimiK3ForConditionalGeneration",
)
GRAPHED_TOKENS = 2048
GRAPHED_SEQUENCES = 32  # a kernel is launched for all that a graph has room for

# (flag, attribute, value that works, why)
REFUSED: tuple[tuple[str, str, Any, str], ...] = (
    (
        "--enable-hierarchical-cache",
        "enable_hierarchical_cache",
        False,
        "states have no host tier",
    ),
    ("--enable-lmcache", "enable_lmcache", False, "it reads device memory by virtual id"),
    ("--disaggregation-mode", "disaggregation_mode", "null", "states are not transferred yet"),
    (
        "--enable-mixed-chunk",
        "enable_mixed_chunk",
        False,
        "a mixed step cannot end on a stop",
    ),
    ("--enable-pdmux", "enable_pdmux", False, "its split prefills would leave no states"),
    (
        "--strip-thinking-cache",
        "strip_thinking_cache",
        False,
        "answers are in the tree while they are written; that nobody resumes one is learned",
    ),
    ("--attn-cp-size", "attn_cp_size", 1, "context-parallel prefill has not been run"),
    ("--pp-size", "pp_size", 1, "each stage would plan its own stops"),
    (
        "--enable-int8-mamba-checkpoint",
        "enable_int8_mamba_checkpoint",
        False,
        "states are kept as the kernels write them",
    ),
    (
        "--mamba-max-states-per-path",
        "mamba_max_states_per_path",
        -1,
        "the tree keeps what is worth its bytes",
    ),
    ("--kv-events-config", "kv_events_config", None, "a router would learn of no prefix"),
)
KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")


def resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `platform_hook.handle_cpu_backends`: the first step that knows the device."""
    view = resolving_view(server_args)
    if view.radix_cache_backend == BACKEND:
        architectures = architectures_of(server_args)
        spread = context_parallel.check(view, architectures)
        refuse_unsupported(view)
        check_prefill_graphs(view)
        check_attention_replicas(view.attn_dp_size, architectures)
        decided: dict[str, Any] = {
            "enable_unified_memory": True,
            "mamba_radix_cache_strategy": "no_buffer",
            **spread,
            **drafts.check(view),
        }
        if view.device == "cuda" and view.linear_attn_prefill_backend is None:
            # Unsaid, SGLang takes FlashInfer's for K3 on a Blackwell, which would leave no states
            # inside a pass.  With one that is asked for, chunks are cut where states are kept.
            decided["linear_attn_prefill_backend"] = view.linear_attn_backend
        if may_graph_prefills(server_args, architectures):
            decided["cuda_graph_config"] = with_prefill_graphs(server_args)
        # Where the operator asked for them, too.
        os.environ.setdefault("SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS", str(GRAPHED_SEQUENCES))
        if view.device == "cpu":
            decided["disable_overlap_schedule"] = True
            decided["attention_backend"] = "torch_native"
            if view.attn_dp_size > 1:
                # The portable model gathers no other rank's rows.
                decided["enable_dp_lm_head"] = True
            # Ranks on a CPU talk over gloo, but SGLang would ask the wheel's NCCL for a GPU first.
            os.environ.setdefault("SGLANG_NCCL_SO_PATH", "none")
        declare_resolution(server_args, SOURCE, **decided)
        keep_conv_dtype(str(model_config_of(server_args).dtype).removeprefix("torch."))
    original(server_args)


def may_graph_prefills(server_args: Any, architectures: Sequence[str]) -> bool:
    """Whether prefills are captured as CUDA graphs although SGLang leaves that off for KDA.

    It has the graphs and has tried them with another model.  Not where the operator said what he
    wants, nor beside what changes a prefill's shape, kernels or memory and has not been run with
    them.
    """
    view = resolving_view(server_args)
    return (
        view.device == "cuda"
        and Options.from_env(os.environ).model != "portable"
        and any(name in GRAPHED for name in architectures)
        and (Phase.PREFILL, "backend") not in server_args._cuda_graph_config_locked  # noqa: SLF001  # as SGLang's own rules
        and view.dcp_size == 1
        and view.attn_dp_size == 1
        and view.speculative_algorithm is None
        and not view.enable_two_batch_overlap
        and not (view.enable_lora or view.lora_paths)
        and not view.enable_deterministic_inference
        and not view.enable_memory_saver
        and (view.linear_attn_prefill_backend or view.linear_attn_backend) == "triton"
        and resolved_view(server_args).moe_a2a_backend == "none"
    )


def check_prefill_graphs(view: Any) -> None:
    """Raise ValueError where graphs of prefills were asked for and would be wrong."""
    if view.dcp_size > 1 and view.cuda_graph_config.prefill.backend != Backend.DISABLED:
        raise ValueError(
            f"--cuda-graph-backend-prefill {view.cuda_graph_config.prefill.backend} cannot capture "
            f"prefills whose KV is spread over GPUs (--dcp-size {view.dcp_size}): SGLang captures "
            "without that layout. Drop --cuda-graph-backend-prefill."
        )


def with_prefill_graphs(server_args: Any) -> Any:
    """SGLang's graph settings with graphs of prefills, of as many tokens as they pay for."""
    view = resolving_view(server_args)
    chosen: dict[str, Any] = {"backend": Backend.BREAKABLE}
    sizes = {(Phase.PREFILL, "max_bs"), (Phase.PREFILL, "bs")}
    if not sizes & server_args._cuda_graph_config_locked:  # noqa: SLF001
        limits = (GRAPHED_TOKENS, view.chunked_prefill_size, view.max_total_tokens)
        chosen["max_bs"] = min(limit for limit in limits if limit and limit > 0)
    logger.info(
        "kimi_k3: prefills of up to %s tokens are captured as CUDA graphs after all; "
        "--disable-prefill-cuda-graph leaves them out",
        chosen.get("max_bs", "the given number of"),
    )
    return with_phase(view.cuda_graph_config, Phase.PREFILL, **chosen)


def validate_no_buffer(original: Callable[..., None], view: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `mamba_hook.validate_mamba_no_buffer`.

    Stock's `no_buffer` reads the live state when a result is processed and so refuses overlap.
    Ours copies it on the forward stream, and its own checks are `refuse_unsupported`.
    """
    if view.radix_cache_backend != BACKEND:
        original(view, *args, **kwargs)


def keep_conv_dtype(serving: str) -> None:
    """Hold the short convolution's rows in the serving dtype unless the operator chose another.

    SGLang's default is bfloat16 whatever the model runs in; in a float32 server a cut prefill
    would then differ from an uncut one.
    """
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", serving)


def page_major_layout(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `kv_cache_hook.handle_page_major_kv_layout`.

    Stock allows kernels that honour the envelope's strides; on the CPU ours does, and stock's list
    does not name it.
    """
    view = resolving_view(server_args)
    if view.radix_cache_backend == BACKEND and view.device == "cpu":
        declare_resolution(server_args, SOURCE, enable_page_major_kv_layout=True)
        return
    original(server_args)


def check_attention_replicas(replicas: int, architectures: Sequence[str]) -> None:
    """Raise ValueError if SGLang's class of this model cannot run attention in replicas.

    `models/kimi_linear.py` builds its KDA layers without `shard_on_attn_tp`: they split their heads
    over all ranks, while the pool has the states of one replica's ranks.
    """
    if replicas > 1 and SPLITS_OVER_ALL in architectures and not is_portable():
        raise ValueError(
            f"--attn-dp-size {replicas} cannot serve {SPLITS_OVER_ALL}: SGLang's class splits KDA "
            "heads over all --tp-size ranks. Drop --attn-dp-size; replicas behind a router "
            "(launch/replicas.sh) do the same for a model of this size."
        )


def architectures_of(server_args: Any) -> Sequence[str]:
    """As the model's config names them."""
    return tuple(model_config_of(server_args).hf_config.architectures or ())


def refuse_unsupported(view: Any) -> None:
    """Raise ValueError naming the flag, its value and the fix for what this backend cannot do."""
    for flag, attribute, works, why in REFUSED:
        value = getattr(view, attribute)
        if value != works and not (value is None and works in (1, False)):
            raise ValueError(
                f"--radix-cache-backend {BACKEND} does not support {flag} (got {value!r}): {why}. "
                f"Drop {flag}."
            )
    if view.dcp_size == 1:  # else when SGLang has chosen kernels, which choose pages
        context_parallel.check_page_size(view.page_size or 1, Options.from_env(os.environ).grid)
    if view.kv_cache_dtype not in KV_DTYPES:
        raise ValueError(
            f"--radix-cache-backend {BACKEND} keeps MLA rows as bfloat16 or fp8, not "
            f"--kv-cache-dtype {view.kv_cache_dtype}. Use --kv-cache-dtype fp8_e4m3 or drop it."
        )
    strategy = view.mamba_radix_cache_strategy
    if strategy not in ("auto", "no_buffer"):
        raise ValueError(
            f"--radix-cache-backend {BACKEND} captures states by cutting chunks and needs "
            f"--mamba-radix-cache-strategy no_buffer (got {strategy!r}). Drop the flag."
        )
    if view.device == "cpu" and view.attention_backend not in (None, "torch_native"):
        raise ValueError(
            f"--attention-backend {view.attention_backend} cannot run the portable model on a CPU. "
            "Use --attention-backend torch_native or drop the flag."
        )
