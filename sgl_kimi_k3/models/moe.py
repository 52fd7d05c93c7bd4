"""K3's feed-forward layers: dense gated MLP and (latent) mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.dp_attention import attn_tp_all_reduce
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sgl_kimi_k3.kernels import pointwise, tiles
from sgl_kimi_k3.kernels.mxfp4 import dequantise
from sgl_kimi_k3.models.linear import Norm, apply, column, replicated, row

if TYPE_CHECKING:
    from sglang.srt.configs.kimi_linear import KimiLinearConfig

Activation = Callable[[Tensor, Tensor], Tensor]


def activation_of(config: KimiLinearConfig) -> Activation:
    """act(gate, up) named by `hidden_act`."""
    if config.hidden_act == "silu":
        return pointwise.silu_and_mul
    if config.hidden_act == "situ":
        # A null beta means 1, a null linear_beta leaves `up` as it is.
        beta = 1.0 if config.activation_situ_beta is None else config.activation_situ_beta
        return partial(
            pointwise.situ_and_mul, beta=beta, linear_beta=config.activation_situ_linear_beta
        )
    raise ValueError(f"hidden_act {config.hidden_act!r} in the model config: use situ or silu")


class DenseMlp(nn.Module):
    """`down(act(gate(x), up(x)))`, also the shared experts."""

    def __init__(self, hidden: int, width: int, activation: Activation) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = column(hidden, width), column(hidden, width)
        self.down_proj = row(width, hidden)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], reduced over the ranks."""
        act = self.activation(apply(self.gate_proj, x), apply(self.up_proj, x))
        return apply(self.down_proj, act)


class Experts(nn.Module):
    """Routed experts, their width spread over the ranks; one product per expert in use."""

    def __init__(self, count: int, hidden: int, width: int, activation: Activation) -> None:
        super().__init__()
        part = width // get_parallel().attn_tp_size
        self.w1, self.w3 = (self._stack(count, part, hidden) for _ in range(2))
        self.w2 = self._stack(count, hidden, part)
        self.activation = activation
        self._halves: dict[tuple[int, str], dict[str, Tensor]] = {}

    @staticmethod
    def _stack(count: int, rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(count, rows, columns), requires_grad=False)

    def load(self, expert: int, name: str, kind: str, loaded: Tensor) -> None:
        """Store one checkpoint tensor `experts.{expert}.{name}.{kind}`.

        Args:
            expert: its number.
            name: w1 (gate), w3 (up) or w2 (down).
            kind: `weight`, or `weight_packed` / `weight_scale` of MXFP4; both are needed and may
                come in any order.
            loaded: the whole, unsharded tensor.
        """
        param: nn.Parameter = getattr(self, name)
        if kind != "weight":
            halves = self._halves.setdefault((expert, name), {})
            halves[kind] = loaded
            if len(halves) < 2:
                return
            del self._halves[expert, name]
            loaded = dequantise(halves["weight_packed"], halves["weight_scale"], param.dtype)
        dim = 1 if name == "w2" else 0
        part = param.shape[1 + dim]
        param.data[expert] = loaded.narrow(dim, get_parallel().attn_tp_rank * part, part)

    def unfinished(self) -> list[tuple[int, str]]:
        """Experts of which only one MXFP4 half has come."""
        return sorted(self._halves)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Weighted sum over each token's experts, ascending, in float64.

        Args:
            x: [T, hidden].
            weights: [T, top_k] float64.
            chosen: [T, top_k] expert numbers, ascending.

        Returns:
            [T, hidden] float64, the rank's partial sum.
        """
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in torch.unique(chosen).tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            rows = x[token]
            act = self.activation(
                tiles.linear(rows, self.w1[expert]), tiles.linear(rows, self.w3[expert])
            )
            result = tiles.linear(act, self.w2[expert]).double()
            out.index_add_(0, token, result * weights[token, place, None])
        return out


class Router(nn.Module):
    """Sigmoid top-k gate; `e_score_correction_bias` stays float32 and only chooses."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        if config.moe_router_activation_func != "sigmoid" or config.num_expert_group != 1:
            raise ValueError(
                "the portable model routes by sigmoid over one expert group, the config asks for "
                f"{config.moe_router_activation_func} over {config.num_expert_group}"
            )
        count = config.num_experts
        self.weight = nn.Parameter(torch.empty(count, config.hidden_size), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(count, dtype=torch.float32), requires_grad=False
        )
        self.top_k = config.num_experts_per_token
        self.renormalise = config.moe_renormalize
        self.scale = config.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float64) and ascending expert numbers, [T, top_k] each."""
        logits = tiles.linear(x.float(), self.weight.float())
        return pointwise.route(
            logits,
            self.e_score_correction_bias,
            self.top_k,
            renormalise=self.renormalise,
            scale=self.scale,
        )


class SparseMoe(nn.Module):
    """Mixture of experts, in a latent space when the config names its width."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        hidden, activation = config.hidden_size, activation_of(config)
        latent = config.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = Experts(
            config.num_experts, latent or hidden, config.moe_intermediate_size, activation
        )
        self.latent = latent is not None
        if self.latent:
            self.routed_expert_down_proj = replicated(hidden, latent)
            self.routed_expert_up_proj = replicated(latent, hidden)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = Norm(latent, config.rms_norm_eps)
        if config.num_shared_experts:
            width = config.moe_intermediate_size * config.num_shared_experts
            self.shared_experts = DenseMlp(hidden, width, activation)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]; router and shared experts read x itself."""
        weights, chosen = self.gate(x)
        z = apply(self.routed_expert_down_proj, x) if self.latent else x
        routed = self.experts(z, weights, chosen)
        if get_parallel().attn_tp_size > 1:
            # Before the norm: the norm of a partial sum is not a partial norm.
            routed = attn_tp_all_reduce(routed)
        routed = routed.to(x.dtype)
        if self.latent:
            if hasattr(self, "routed_expert_norm"):
                norm = self.routed_expert_norm
                routed = pointwise.rms_norm(routed, norm.weight, norm.eps)
            routed = apply(self.routed_expert_up_proj, routed)
        return routed + self.shared_experts(x) if hasattr(self, "shared_experts") else routed
