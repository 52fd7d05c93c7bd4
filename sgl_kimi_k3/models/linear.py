"""SGLang's parallel linear layers over `kernels.tiles`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from sgl_kimi_k3.kernels import tiles


class TiledLinearMethod(UnquantizedLinearMethod):
    """SGLang's "quant method" seam: plain weights, products in fixed-shape tiles."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Keep the weight as loaded; the AMX packing of the base class would change the product."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`; also called by LogitsProcessor for the head."""
        out = tiles.linear(x, layer.weight)
        return out if bias is None else out + bias


def _tiled(layer: nn.Module) -> nn.Module:
    layer.quant_method = TiledLinearMethod()
    return layer


def replicated(width_in: int, width_out: int, **options: Any) -> ReplicatedLinear:
    """A linear layer every rank holds whole."""
    return _tiled(ReplicatedLinear(width_in, width_out, bias=False, **options))


def column(width_in: int, width_out: int) -> ColumnParallelLinear:
    """A linear layer whose outputs are spread over the ranks of an attention group."""
    return _tiled(ColumnParallelLinear(width_in, width_out, bias=False, parallel_group="attn_tp"))


def row(width_in: int, width_out: int) -> RowParallelLinear:
    """A linear layer whose inputs are spread over those ranks; the sum is reduced here."""
    return _tiled(
        RowParallelLinear(
            width_in, width_out, bias=False, parallel_group="attn_tp", use_dp_attention_reduce=True
        )
    )


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output without SGLang's (output, bias) pair."""
    return layer(x)[0]


class Norm(nn.Module):
    """RMS norm's weight; `dtype` is float32 where the checkpoint keeps it so."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False)
        self.eps = eps
