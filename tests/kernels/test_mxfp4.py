"""MXFP4 against compressed-tensors, which wrote the checkpoint."""

import pytest
import torch

from sgl_kimi_k3.kernels.mxfp4 import dequantise


def test_every_byte_is_compressed_tensors() -> None:
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = torch.tensor([[1, 100, 127, 128], [0, 126, 130, 200], [127] * 4, [250] * 4])
    scale = scale.to(torch.uint8)
    values = unpack_fp4_from_uint8(packed, 4, 128, dtype=torch.float32)
    factor = decompress_mx_scale(scale).float().repeat_interleave(32, dim=1)
    assert torch.equal(dequantise(packed, scale, torch.float32), values * factor)


def test_nibble_order_and_sign() -> None:
    packed = torch.full((1, 16), 0xF1, dtype=torch.uint8)
    out = dequantise(packed, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    assert out[0, :4].tolist() == [1.0, -12.0, 1.0, -12.0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        dequantise(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2), torch.float32)
