"""States written inside a prefill pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_kimi_k3.state_pass import Plan
from tests.kernels.state_pass_inputs import Inputs


def test_a_plan_names_chunks_slots_and_ends() -> None:
    """Sequences of 130 and 70 tokens have 3 and 2 chunks; the second starts at token 130."""
    plan = Plan.of([130, 70], [(0, 64, 6), (0, 128, 7), (1, 64, 1)], torch.device("cpu"))
    assert plan.targets.tolist() == [-1, 6, 7, -1, 1]
    assert plan.slots.tolist() == [6, 7, 1]
    assert plan.ends.tolist() == [64, 128, 194]


@pytest.mark.parametrize("tokens", [0, 63, 128])
def test_a_place_the_kernel_does_not_pass_is_refused(tokens: int) -> None:
    with pytest.raises(AssertionError):
        Plan.of([128], [(0, tokens, 1)], torch.device("cpu"))


def test_the_kernel_in_the_interpreter() -> None:
    """As stock's, and as the definition says."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpret_state_pass"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1] == "as the definition"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "heads"), [([16384], 12), ([1, 64, 65, 4000, 128], 16), ([300] * 20, 12)]
)
def test_the_kernel_on_a_gpu(lengths: list[int], heads: int) -> None:
    """K3's head sizes: what stock's kernel gives, bit for bit, and exact states beside it."""
    inputs = Inputs.random(
        lengths, heads=heads, key_size=128, value_size=128, dtype=torch.bfloat16, device="cuda"
    )
    inputs.compare_with_stock(tolerance=0.0)  # the same bits
    inputs.compare_with_truth(tolerance=1e-2)  # operands of 16 bits
