"""Compares TritonMover with HostMover on the CPU; needs TRITON_INTERPRET=1."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from mempool.kernels import CHUNK, TritonMover
from mempool.storage import HostMover


def compare(unit_bytes: int, device: str) -> None:
    """Both movers on the same bytes."""
    generator = torch.Generator().manual_seed(unit_bytes)
    rows = torch.randint(0, 256, (12, unit_bytes), dtype=torch.uint8, generator=generator)
    target = rows.to(device, copy=True)
    for mover in (HostMover(rows), TritonMover(target)):
        mover.copy(np.array([11, 3, 7]), np.array([0, 5, 2]))
        mover.zero(np.array([1, 11]))
    assert torch.equal(target.cpu(), rows), f"units of {unit_bytes} bytes differ"


def compare_beyond_int32(unit_bytes: int) -> None:
    """The last unit starts above byte and word 2**31; an odd size keeps words one byte wide."""
    last = 2**31 // unit_bytes + 3
    rows = torch.zeros(last + 1, unit_bytes, dtype=torch.uint8)
    rows[last] = 7
    mover = TritonMover(rows)
    mover.copy(np.array([last]), np.array([last - 1]))
    mover.zero(np.array([last]))
    assert bool((rows[last - 1] == 7).all()), "the copy went elsewhere"
    assert not rows[last].any(), "the zeroes went elsewhere"
    assert not rows[:4].any(), "an offset wrapped"


if __name__ == "__main__":
    for size in (8 * CHUNK + 64, 1001):
        compare(size, "cpu")
        print(size, "ok")
    compare_beyond_int32(1001)
    print("beyond int32 ok")
