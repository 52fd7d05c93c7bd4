"""Products with a weight, in blocks of one fixed shape.

A BLAS picks its kernel, and with it the order of each sum, by the number of rows. Rows are
therefore padded to full tiles and every tile is its own product of the same shape: a row's result
then depends on nothing but the row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 16
"""Rows per tile: a decode batch pays for padding, a prefill for many small products."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for x [..., in] and weight [out, in]; the result has x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    padded = _pad(flat)
    if padded.dtype == torch.float32 and padded.shape[0] > ROWS:
        # One batched call; for 16-bit types torch's batched product is far slower than a loop.
        tiles = padded.view(-1, ROWS, padded.shape[1])
        out = torch.bmm(tiles, weight.t().expand(tiles.shape[0], -1, -1)).flatten(0, 1)
    else:
        out = torch.cat([functional.linear(tile, weight) for tile in padded.split(ROWS)])
    return out[: flat.shape[0]].view(*x.shape[:-1], weight.shape[0])


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One product per head: x [T, H, in], weight [H, in, out] -> [T, H, out]."""
    padded = _pad(x.reshape(x.shape[0], -1)).view(-1, *x.shape[1:])
    out = [torch.bmm(tile.transpose(0, 1), weight) for tile in padded.split(ROWS)]
    return torch.cat(out, dim=1).transpose(0, 1)[: x.shape[0]]


def _pad(x: Tensor) -> Tensor:
    missing = -x.shape[0] % ROWS
    # A tile must start on the same alignment wherever its rows come from.
    return functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
