"""Norms, gates, activations, router and residual mix: float64 inside, rounded once.

The shapes and formulas are those of `naive`; results have the dtype of the first argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kimi_k3.kernels import naive

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension."""
    return naive.rms_norm(x.double(), weight.double(), eps).to(x.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Per-head RMS norm times `sigmoid(gate)`; x may be wider than gate and gives the dtype."""
    wide = naive.gated_norm(x.double(), gate.double(), weight.double(), eps)
    return wide.to(gate.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`."""
    return (x.double() * naive.sigmoid(gate.double())).to(x.dtype)


def log_decay(logits: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log retention [T, H, K], left in float64 for the recurrence (`naive.log_decay`)."""
    return naive.log_decay(logits.double(), a_log.double(), dt_bias.double(), lower_bound)


def gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """Log retention [..., H, K] and beta [..., H], both float64, from the logits of both."""
    log_a = log_decay(a.flatten(0, -3), a_log.flatten(), dt_bias, lower_bound)
    return log_a.view(a.shape), naive.sigmoid(b.double())


def situ_and_mul(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU-GLU (`naive.situ`)."""
    return naive.situ(gate.double(), up.double(), beta, linear_beta).to(gate.dtype)


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, in x's dtype."""
    return x * naive.sigmoid(x)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, Kimi-Linear's activation."""
    return (silu(gate.double()) * up.double()).to(gate.dtype)


def route(
    logits: Tensor, bias: Tensor, top_k: int, *, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Router weights (float64) and ascending expert numbers, both [T, top_k]."""
    return naive.route(logits.double(), bias.double(), top_k, renormalise=renormalise, scale=scale)


def mix(rows: Tensor, query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Block attention residuals' read of rows [R, T, hidden] (`naive.mix`)."""
    return naive.mix(rows.double(), query.double(), weight.double(), eps).to(rows.dtype)
