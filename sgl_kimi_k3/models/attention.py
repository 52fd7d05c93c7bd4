"""K3's two kinds of token mixer: KDA (linear) and Gated MLA (full, absorbed)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sgl_kimi_k3.kernels import pointwise, tiles
from sgl_kimi_k3.models.linear import Norm, apply, column, replicated, row

if TYPE_CHECKING:
    from sglang.srt.configs.kimi_linear import KimiLinearConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

LATENT_NORM_EPS = 1e-6
"""The checkpoint's code builds MLA's two latent norms without eps, which means 1e-6."""


def rank_slice(param: nn.Parameter, loaded: Tensor) -> None:
    """Weight loader: the rank's part of a flat per-head tensor, what lies past all ranks cut off.

    K3's checkpoint stores `A_log` with 128 entries for 96 heads; the rest is padding.
    """
    start = get_parallel().attn_tp_rank * param.numel()
    param.data.copy_(loaded.flatten()[start : start + param.numel()].view_as(param))


def _float32(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)
    param.weight_loader = rank_slice
    return param


class ShortConv(nn.Module):
    """Weight of one depthwise convolution, [channels, 1, W] float32 as in the checkpoint."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = _float32(channels, 1, width)


class KimiDeltaAttention(nn.Module):
    """KDA layer: projections, SGLang's linear-attention call, gated norm, output projection."""

    def __init__(self, config: KimiLinearConfig, layer_id: int) -> None:
        super().__init__()
        linear: dict[str, Any] = config.linear_attn_config
        self.head_dim = linear["head_dim"]
        heads, width = linear["num_heads"], linear["num_heads"] * linear["head_dim"]
        hidden, ranks = config.hidden_size, get_parallel().attn_tp_size
        if heads % ranks:
            raise ValueError(f"--tp-size {ranks} must divide the {heads} KDA heads of this model")
        self.full_rank_gate = bool(linear.get("use_full_rank_gate", False))
        self.q_proj, self.k_proj, self.v_proj = (column(hidden, width) for _ in range(3))
        self.b_proj = column(hidden, heads)
        self.f_a_proj = replicated(hidden, self.head_dim)
        self.f_b_proj = column(self.head_dim, width)
        if self.full_rank_gate:
            self.g_proj = column(hidden, width)
        else:
            self.g_a_proj = replicated(hidden, self.head_dim)
            self.g_b_proj = column(self.head_dim, width)
        convs = (ShortConv(width // ranks, linear["short_conv_kernel_size"]) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convs
        self.A_log = _float32(heads // ranks)
        self.dt_bias = _float32(width // ranks)
        self.o_norm = Norm(self.head_dim, config.rms_norm_eps, torch.float32)
        self.o_proj = row(width, hidden)
        self.attn = RadixLinearAttention(
            layer_id=layer_id,
            num_q_heads=heads // ranks,
            num_k_heads=heads // ranks,
            num_v_heads=heads // ranks,
            head_q_dim=self.head_dim,
            head_k_dim=self.head_dim,
            head_v_dim=self.head_dim,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=linear.get("gate_lower_bound"),
        )

    def post_load(self) -> None:
        """Join the three convolutions; call after each change of the weights."""
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        self.attn.conv_weights = torch.cat([conv.weight.data[:, 0] for conv in convs])

    def forward(self, x: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """[T, hidden] normed -> [T, hidden], reduced over the ranks."""
        mixed = torch.cat([apply(p, x) for p in (self.q_proj, self.k_proj, self.v_proj)], -1)
        forget = apply(self.f_b_proj, apply(self.f_a_proj, x))
        if not forward_batch.forward_mode.is_decode():
            # What SGLang's backends take: [1, T, heads, head_dim] when extending, flat else.
            forget = forget.unflatten(-1, (-1, self.head_dim))[None]
        beta = apply(self.b_proj, x)[None]
        out = self.attn(forward_batch, mixed_qkv=mixed, a=forget, b=beta)
        if self.full_rank_gate:
            gate = apply(self.g_proj, x)
        else:
            gate = apply(self.g_b_proj, apply(self.g_a_proj, x))
        gate = gate.unflatten(-1, (-1, self.head_dim))
        out = pointwise.gated_norm(out[0], gate, self.o_norm.weight, self.o_norm.eps)
        return apply(self.o_proj, out.flatten(-2))


class GatedLatentAttention(nn.Module):
    """MLA without rotary positions, absorbed in prefill and decode alike, with an output gate."""

    def __init__(self, config: KimiLinearConfig, layer_id: int) -> None:
        super().__init__()
        hidden, heads, ranks = (
            config.hidden_size,
            config.num_attention_heads,
            get_parallel().attn_tp_size,
        )
        self.rank, self.nope = config.kv_lora_rank, config.qk_nope_head_dim
        self.rope, self.v_dim = config.qk_rope_head_dim, config.v_head_dim
        self.qk_dim = self.nope + self.rope
        if config.q_lora_rank is None:
            self.q_proj = column(hidden, heads * self.qk_dim)
        else:
            self.q_a_proj = replicated(hidden, config.q_lora_rank)
            self.q_a_layernorm = Norm(config.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = column(config.q_lora_rank, heads * self.qk_dim)
        self.kv_a_proj_with_mqa = replicated(hidden, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = column(self.rank, heads * (self.nope + self.v_dim))
        self.gated = bool(config.mla_use_output_gate)
        if self.gated:
            self.g_proj = column(hidden, heads * self.v_dim)
        self.o_proj = row(heads * self.v_dim, hidden)
        self.attn_mqa = RadixAttention(
            num_heads=heads // ranks,
            head_dim=self.rank + self.rope,
            scaling=self.qk_dim**-0.5,
            num_kv_heads=1,
            layer_id=layer_id,
            v_head_dim=self.rank,
        )

    def post_load(self) -> None:
        """Split `kv_b_proj`: queries go through [h, rank, nope], values through [h, v, rank]."""
        per_head = self.kv_b_proj.weight.data.unflatten(0, (-1, self.nope + self.v_dim))
        self.w_kc = per_head[:, : self.nope].transpose(1, 2).contiguous()
        self.w_vc = per_head[:, self.nope :].contiguous()

    def forward(self, x: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """[T, hidden] normed -> [T, hidden], reduced over the ranks."""
        if hasattr(self, "q_proj"):
            q = apply(self.q_proj, x)
        else:
            norm = self.q_a_layernorm
            q = apply(
                self.q_b_proj, pointwise.rms_norm(apply(self.q_a_proj, x), norm.weight, norm.eps)
            )
        q_nope, q_pe = q.unflatten(-1, (-1, self.qk_dim)).split((self.nope, self.rope), -1)
        latent, k_pe = apply(self.kv_a_proj_with_mqa, x).split((self.rank, self.rope), -1)
        latent = pointwise.rms_norm(latent, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        query = torch.cat((tiles.heads_linear(q_nope, self.w_kc), q_pe), -1)
        # The 64 shared dimensions are plain ones: nothing is rotated (NoPE).
        key = torch.cat((latent, k_pe), -1)[:, None]
        out = self.attn_mqa(query.flatten(1), key, latent[:, None], forward_batch)
        out = tiles.heads_linear(out.unflatten(-1, (-1, self.rank)), self.w_vc).flatten(1)
        if self.gated:
            out = pointwise.sigmoid_gate(out, apply(self.g_proj, x))
        return apply(self.o_proj, out)
