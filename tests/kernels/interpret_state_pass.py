"""Compares the state pass with the truth and with stock's kernel; needs TRITON_INTERPRET=1."""

import warnings

import sglang.kernels.ops.attention.fla.chunk_delta_h as stock
import torch
import triton
import triton.language as tl

from sgl_kimi_k3 import state_pass
from tests.kernels.state_pass_inputs import Inputs


@triton.jit
def exp2(x):
    """The interpreter knows this one; stock's is an alias it does not patch."""
    return tl.exp2(x)


def main() -> None:
    """Three sequences; states at 64 and 128 of the first and at 64 of the last.

    In float32, to the order of a sum: the interpreter multiplies bfloat16 wrongly.
    """
    stock.exp2 = exp2
    inputs = Inputs.random(
        [130, 64, 70], heads=2, key_size=128, value_size=64, dtype=torch.float32, device="cpu"
    )
    inputs.compare_with_stock(tolerance=2e-5)
    print("as stock's")
    inputs.compare_with_truth(tolerance=1e-5)
    print("as the definition")
    inputs.compare_with_padded(sequences=7, chunks=9)
    print("the same in tables with room to spare")
    states = torch.randn(3, 2, 64, 128)
    before = states.clone()
    state_pass.warm_up(states, torch.float32, torch.int64)
    assert states.equal(before)
    print("the warm-up leaves every state as it is")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    assert state_pass.CHUNK == stock.CHUNK_SIZE
    main()
