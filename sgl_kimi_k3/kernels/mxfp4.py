"""MXFP4 weights: two E2M1 values per byte, one power-of-two scale per 32 input columns."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Expand compressed-tensors' `mxfp4-pack-quantized` weights.

    Args:
        packed: [out, in / 2] uint8; byte i holds column 2i in its low nibble, 2i+1 in its high one.
        scale: [out, in / 32] uint8, biased exponents: the group's factor is 2^(scale - 127).
        dtype: of the result.

    Returns:
        [out, in].
    """
    rows, groups = scale.shape
    if packed.shape != (rows, groups * GROUP // 2):
        raise ValueError(f"packed {tuple(packed.shape)} does not fit scale {tuple(scale.shape)}")
    nibbles = torch.stack((packed & 0xF, packed >> 4), -1).view(rows, groups, GROUP)
    values = torch.tensor(_VALUES, dtype=torch.float32, device=packed.device)[nibbles.int()]
    # ldexp would build its factor in float32; 2^-127 is subnormal there, so go through float64.
    factor = torch.exp2(scale.double() - 127)
    return (values * factor[..., None]).view(rows, -1).to(dtype)
