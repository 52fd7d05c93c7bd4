"""The short convolution and its three raw rows of state."""

import pytest
import torch
from torch.nn import functional

from sgl_kimi_k3.kernels import naive
from sgl_kimi_k3.kernels.conv import conv_decode, conv_prefill

CHANNELS, WIDTH = 21, 4


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    return torch.randn(tokens, CHANNELS), torch.randn(CHANNELS, WIDTH), torch.randn(3, CHANNELS)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 17])
def test_prefill_is_the_truth(tokens) -> None:
    u, weight, rows = inputs(tokens)
    out, kept = conv_prefill(u, weight, rows)
    expected, _ = naive.short_conv(u.double(), weight.double(), rows.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(kept, torch.cat((rows, u))[-3:])


def test_the_truth_is_a_padded_conv1d() -> None:
    u, weight, rows = inputs(12)
    padded = torch.cat((torch.zeros_like(rows), u)).t()[None]
    expected = functional.silu(functional.conv1d(padded, weight[:, None], groups=CHANNELS))[0].t()
    out, _ = naive.short_conv(u, weight, torch.zeros_like(rows))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_cut_anywhere_gives_the_same_bits(cut) -> None:
    u, weight, rows = inputs(9)
    out, kept = conv_prefill(u, weight, rows)
    head, middle = conv_prefill(u[:cut], weight, rows)
    tail, resumed = conv_prefill(u[cut:], weight, middle)
    assert torch.equal(torch.cat((head, tail)), out)
    assert torch.equal(resumed, kept)


def test_decode_is_prefill_of_one_token() -> None:
    u, weight, _ = inputs(4)
    rows = torch.randn(4, 3, CHANNELS)
    out, kept = conv_decode(u, weight, rows)
    for i in range(4):
        alone, alone_kept = conv_prefill(u[i : i + 1], weight, rows[i])
        assert torch.equal(out[i : i + 1], alone)
        assert torch.equal(kept[i], alone_kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_keep_the_pools_dtype(dtype) -> None:
    """Activations of one 16-bit type over a pool of another (cases D6)."""
    u, weight, rows = inputs(5)
    out, kept = conv_prefill(u.to(dtype), weight, rows.float())
    assert out.dtype == dtype
    assert kept.dtype == torch.float32
    assert torch.equal(kept[-3:].to(dtype), u.to(dtype)[-3:])
