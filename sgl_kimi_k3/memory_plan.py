"""What will fit: bytes per state and block, and the limits a server will really have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool import Geometry, unit_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

KV_ITEMSIZE = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "bf16": 2}  # --kv-cache-dtype


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One rank's plan.

    Attributes:
        state_bytes: one request's KDA state over all layers.
        token_bytes: one token's MLA rows over all layers, on the rank that holds them.
        geometry: the arena, or None while its size is unknown (a GPU server profiles it after
            loading the weights).
        asked_requests: `--max-running-requests`, None if unset.
        asked_tokens: `--max-total-tokens` of all `dcp` ranks, None if unset.
        dcp: ranks over which tokens are spread.
        window_tokens: of a draft window, 0 without drafts.
        window_bytes: what one request's window takes beside the arena.
    """

    state_bytes: int
    token_bytes: int
    geometry: Geometry | None
    asked_requests: int | None
    asked_tokens: int | None
    dcp: int = 1
    window_tokens: int = 0
    window_bytes: int = 0

    def lines(self) -> Iterator[str]:
        """The plan for people."""
        spread = f" on one of {self.dcp} ranks" if self.dcp > 1 else ""
        yield (
            f"one KDA state {size_text(self.state_bytes)}, one token of MLA KV "
            f"{size_text(self.token_bytes)}{spread}: "
            f"a state weighs {self.state_bytes * self.dcp / self.token_bytes:,.0f} tokens of KV"
        )
        if self.window_tokens:
            yield (
                f"draft windows of {self.window_tokens} tokens: {size_text(self.window_bytes)} for "
                f"each of {self.asked_requests:,} requests, beside the arena"
            )
        if self.geometry is None:
            yield "arena: sized from free GPU memory after loading; its size is logged at start"
            return
        geometry = self.geometry
        tokens = geometry.max_blocks * geometry.block_size
        longest = self.longest_request()
        yield (
            f"arena {size_text(geometry.total_bytes)}, shared without a split: "
            f"{geometry.max_states:,} states or {tokens:,} tokens; "
            f"longest single request {longest:,} tokens"
            + (f" (asked for {self.asked_tokens:,} tokens)" if self.asked_tokens else "")
        )
        yield (
            f"requests of 1,000 tokens at once: {self.concurrent(1000):,}"
            + (f", limited to {self.asked_requests:,} as asked" if self.asked_requests else "")
        )

    def longest_request(self) -> int:
        """Tokens that fit beside one live state."""
        assert self.geometry is not None
        geometry = self.geometry
        return geometry.blocks_above(geometry.state_end(1)) * geometry.block_size

    def concurrent(self, tokens: int) -> int:
        """How many requests of `tokens` tokens fit at once, nothing cached."""
        assert self.geometry is not None
        return bundles(self.geometry, states=1, blocks=self.geometry.blocks_of(tokens))


def bundles(
    geometry: Geometry,
    *,
    states: int,
    blocks: int,
    shared_states: int = 0,
    shared_blocks: int = 0,
) -> int:
    """How often a bundle of states (at least one) and blocks fits, beside what all share."""
    low, high = 0, geometry.max_states // states
    while low < high:
        middle = (low + high + 1) // 2
        top = geometry.state_end(shared_states + middle * states)
        if top <= geometry.block_start(shared_blocks + middle * blocks):
            low = middle
        else:
            high = middle - 1
    return low


def plan_of(server_args: Any) -> MemoryPlan:
    """The plan for resolved SGLang arguments.

    Raises:
        ValueError: the model has no KDA state, or the pool cannot hold one request.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of  # noqa: PLC0415
    from sglang.srt.arg_groups.overrides import resolving_view  # noqa: PLC0415
    from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: PLC0415
    from sglang.srt.runtime_context import attn_tp_size_of, get_parallel  # noqa: PLC0415

    from sgl_kimi_k3.windows import window_bytes  # noqa: PLC0415  # imports torch

    view, model = resolving_view(server_args), model_config_of(server_args)
    hybrid = mambaish_config(model)
    if hybrid is None:
        raise ValueError(
            f"{view.model_path} ({model.hf_config.architectures}) has no recurrent state; this "
            "backend serves Kimi K3 and Kimi Linear. Use plain `sglang serve`."
        )
    with get_parallel().override(attn_tp_size=attn_tp_size_of(view)):  # unpublished before launch
        kv_itemsize = KV_ITEMSIZE.get(view.kv_cache_dtype, model.dtype.itemsize)
        state_bytes, token_bytes = unit_bytes_of(hybrid, model, kv_itemsize)
        params, window = hybrid.mamba2_cache_params, 0
        if view.speculative_algorithm:
            window = view.speculative_num_draft_tokens
    return MemoryPlan(
        state_bytes=state_bytes,
        token_bytes=token_bytes,
        geometry=_geometry(view, state_bytes, token_bytes),
        asked_requests=view.max_running_requests,
        asked_tokens=view.max_total_tokens and view.max_total_tokens * view.dcp_size,
        dcp=view.dcp_size,
        window_tokens=window,
        window_bytes=window_bytes(params, layers=len(params.layers), tokens=window),
    )


def unit_bytes_of(hybrid: Any, model: Any, kv_itemsize: int) -> tuple[int, int]:
    """Bytes of one state and of one token's rows on this rank, from SGLang's two configs."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415  # seconds to import

    dtype, linear = hybrid.mamba2_cache_params.dtype, hybrid.linear_attn_config
    return unit_bytes(
        n_kda=len(hybrid.linear_layer_ids),
        n_mla=len(hybrid.full_attention_layer_ids),
        num_heads=linear["num_heads"],
        head_dim=linear["head_dim"],
        conv_kernel=linear["short_conv_kernel_size"],
        kv_lora_rank=model.kv_lora_rank,
        rope_dim=model.qk_rope_head_dim,
        state_itemsize=dtype.temporal.itemsize,
        conv_itemsize=dtype.conv.itemsize,
        kv_itemsize=kv_itemsize,
        tp=get_parallel().attn_tp_size,
    )


def given_bytes(tokens: int, states: int, replicas: int, *, token: int, state: int) -> int:
    """One rank's arena from `--max-total-tokens` and `--max-mamba-cache-size`, in bytes.

    SGLang adds them up.  Among attention replicas it shares the states; the tokens are each one's,
    and under DCP each rank's: all ranks together hold as many times more.
    """
    return tokens * token + states // replicas * state


def _geometry(view: Any, state_bytes: int, token_bytes: int) -> Geometry | None:
    if view.max_total_tokens is None or view.max_mamba_cache_size is None:
        return None
    try:
        geometry = Geometry(
            total_bytes=given_bytes(
                view.max_total_tokens,
                view.max_mamba_cache_size,
                view.attn_dp_size,
                token=token_bytes,
                state=state_bytes,
            ),
            state_bytes=state_bytes,
            block_bytes=token_bytes * (view.page_size or 1),
            block_size=(view.page_size or 1) * view.dcp_size,
        )
        # SGLang's own floor: the state of one request and two more to work with.
        geometry.require(states=3, blocks=1, flag="--max-mamba-cache-size or --max-total-tokens")
    except ValueError as error:
        raise ValueError(
            f"--max-total-tokens {view.max_total_tokens} with --max-mamba-cache-size "
            f"{view.max_mamba_cache_size} is too small: {error}"
        ) from None
    return geometry


def size_text(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
