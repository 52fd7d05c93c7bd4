"""Seeded random operands for the KDA kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgl_kimi_k3.kernels import naive


class Operands(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_a: Tensor
    beta: Tensor

    def part(self, start: int, stop: int) -> Operands:
        return Operands(*(x[start:stop] for x in self))


def operands(
    tokens: int,
    *,
    heads: int = 3,
    k_dim: int = 24,
    v_dim: int = 40,
    lower_bound: float | None = -5.0,
    seed: int = 0,
) -> Operands:
    """float32 operands with K != V, so that a transposed state cannot hide."""
    torch.manual_seed(seed)
    gate = naive.log_decay(
        2 * torch.randn(tokens, heads, k_dim),
        torch.randn(heads),
        torch.randn(heads * k_dim),
        lower_bound,
    )
    return Operands(
        torch.randn(tokens, heads, k_dim),
        torch.randn(tokens, heads, k_dim),
        torch.randn(tokens, heads, v_dim),
        gate,
        torch.rand(tokens, heads),
    )


def state(heads: int = 3, v_dim: int = 40, k_dim: int = 24, *, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(heads, v_dim, k_dim)


def wide(parts: Operands) -> Operands:
    return Operands(*(x.double() for x in parts))
