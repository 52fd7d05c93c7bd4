"""A row's product depends on nothing but the row."""

import pytest
import torch

from sgl_kimi_k3.kernels import tiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(100, 36), (128, 512), (512, 1024), (7168, 64)])
def test_rows_do_not_depend_on_the_batch(dtype, shape) -> None:
    torch.manual_seed(0)
    width_in, width_out = shape
    weight, x = torch.randn(width_out, width_in).to(dtype), torch.randn(80, width_in).to(dtype)
    whole = tiles.linear(x, weight)
    # To the rounding of sums of `width_in` terms around 1.
    torch.testing.assert_close(
        whole, x @ weight.t(), rtol=0, atol=width_in * torch.finfo(dtype).eps
    )
    for start, stop in [(0, 1), (3, 4), (5, 21), (7, 24), (0, 33), (79, 80)]:
        assert torch.equal(tiles.linear(x[start:stop], weight), whole[start:stop])


@pytest.mark.parametrize("shape", [(24, 40), (16, 10), (12, 16), (512, 128)])
def test_heads_do_not_depend_on_the_batch(shape) -> None:
    """(16, 10) fails with weights the other way round, where MKL has AVX2 only."""
    torch.manual_seed(0)
    width_in, width_out = shape
    weight, x = torch.randn(3, width_out, width_in), torch.randn(40, 3, width_in)
    whole = tiles.heads_linear(x, weight)
    expected = torch.einsum("thd,hrd->thr", x, weight)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=width_in * 1e-6)
    for start, stop in [(0, 1), (1, 40), (5, 21), (9, 40), (39, 40)]:
        assert torch.equal(tiles.heads_linear(x[start:stop], weight), whole[start:stop])
