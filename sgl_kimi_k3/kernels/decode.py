"""One KDA step for a batch of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kimi_k3.kernels import naive


def kda_decode(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance B states by one token each (`naive.delta_rule`, float64 inside).

    Args:
        q: [B, H, K], as the short convolution left it.
        k: [B, H, K], the same.
        v: [B, H, V].
        log_a: [B, H, K].
        beta: [B, H], in (0, 1).
        states: [B, H, V, K].

    Returns:
        [B, H, V] float64, and the new states in the states' dtype.
    """
    q = naive.l2_normalise(q.double()) * q.shape[-1] ** -0.5
    state = advance(k, v, log_a, beta, states)
    return (state * q[..., None, :]).sum(-1), state.to(states.dtype)


def advance(k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """The states of `kda_decode` before they are rounded: [B, H, V, K] float64."""
    k = naive.l2_normalise(k.double())
    state = states.double() * torch.exp(log_a.double())[..., None, :]
    error = v.double() - (state * k[..., None, :]).sum(-1)
    return state + (beta.double()[..., None] * error)[..., None] * k[..., None, :]
