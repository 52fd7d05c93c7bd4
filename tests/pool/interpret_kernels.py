"""Compares TritonMover with HostMover on the CPU; needs TRITON_INTERPRET=1."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from mempool.kernels import CHUNK, TritonMover
from mempool.storage import HostMover


def compare(width: int, unit_bytes: int) -> None:
    """Both movers on the same bytes."""
    generator = torch.Generator().manual_seed(unit_bytes)
    rows = torch.randint(0, 256, (12, unit_bytes), dtype=torch.uint8, generator=generator)
    expected = rows.clone()
    for mover, target in ((HostMover, expected), (TritonMover, rows)):
        mover(target).copy(np.array([11, 3, 7]), np.array([0, 5, 2]))
        mover(target).zero(np.array([1, 11]))
    assert torch.equal(rows, expected), f"units of {unit_bytes} bytes differ"
    print(f"words {width} ok")


if __name__ == "__main__":
    compare(8, 8 * CHUNK + 64)
    compare(1, 1001)
