"""Products with a weight, in blocks of one fixed shape.

A BLAS picks its kernel, and with it the order of each sum, by the number of rows. Rows are
therefore padded to full tiles and every tile is its own product of the same shape: a row's result
then depends on nothing but the row.  Weights are [out, in] and used transposed: where they lie the
other way round, some BLAS sums the rows at a tile's end otherwise than those before.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 16
"""Rows per tile: a decode batch pays for padding, a prefill for many small products."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` for x [..., in] and weight [out, in]; the result has x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    padded, columns = _pad(flat), weight.t()
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    # Not one batched product: its kernels, too, depend on the number of tiles.
    for tile, result in zip(padded.split(ROWS), out.split(ROWS), strict=True):
        torch.mm(tile, columns, out=result)
    return out[: flat.shape[0]].view(*x.shape[:-1], weight.shape[0])


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` per head: x [T, H, in], weight [H, out, in] -> [T, H, out]."""
    padded = _pad(x.reshape(x.shape[0], -1)).view(-1, *x.shape[1:])
    columns = weight.transpose(1, 2)
    out = [torch.bmm(tile.transpose(0, 1), columns) for tile in padded.split(ROWS)]
    return torch.cat(out, dim=1).transpose(0, 1)[: x.shape[0]]


def _pad(x: Tensor) -> Tensor:
    missing = -x.shape[0] % ROWS
    # A tile must start on the same alignment wherever its rows come from.
    return torch.constant_pad_nd(x, (0, 0, 0, missing)) if missing else x.contiguous()
