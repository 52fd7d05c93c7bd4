"""The short convolution before KDA, for a prefill and for a decode step.

State of one sequence: [W-1, channels], the inputs of its last tokens, oldest first, before the
convolution; channels are the rank's `q | k | v`. SGLang's pool holds it as `conv[0][slot]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kimi_k3.kernels import pointwise


def conv_prefill(inputs: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve one sequence (`naive.short_conv`).

    Args:
        inputs: [T, channels].
        weight: [channels, W], float32.
        rows: [W-1, channels], zeros for a sequence without a prefix.

    Returns:
        [T, channels] of the inputs' dtype, and the new rows in `rows`' dtype.
    """
    width = weight.shape[1]
    window = torch.cat((rows.to(inputs.dtype), inputs))
    out = torch.zeros(inputs.shape, dtype=torch.float64, device=inputs.device)
    for j in range(width):
        out += window[j : j + inputs.shape[0]].double() * weight[:, j].double()
    return pointwise.silu(out).to(inputs.dtype), window[1 - width :].to(rows.dtype)


def conv_decode(inputs: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each of B sequences: inputs [B, channels], rows [B, W-1, channels]."""
    window = torch.cat((rows.to(inputs.dtype), inputs[:, None]), dim=1)
    out = torch.zeros(inputs.shape, dtype=torch.float64, device=inputs.device)
    for j in range(weight.shape[1]):
        out += window[:, j].double() * weight[:, j].double()
    return pointwise.silu(out).to(inputs.dtype), window[:, 1:].to(rows.dtype)
