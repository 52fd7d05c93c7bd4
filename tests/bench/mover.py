"""Bandwidth of the pool's moves and zeroes on one GPU: `python -m tests.bench.mover`.

Checks `TritonMover` against numpy first, then moves and zeroes states and blocks of Kimi K3 at TP8
in an arena of 16 GiB. A copy reads and writes, so it counts twice; `copy_` of one large tensor in
the same run is what the device can do.
"""

import json

import numpy as np
import torch

from mempool import Geometry, Move, Side
from mempool.storage import Storage
from tests.pool.interpret_kernels import compare

GEOMETRY = Geometry.of_model(16 * 2**30, n_kda=69, n_mla=24, num_heads=96, head_dim=128, tp=8)
REPEATS = 20


def seconds(call) -> float:
    """Median time of one call between device events."""
    times = []
    for _ in range(REPEATS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times[3:])[REPEATS // 2]


def main() -> None:
    for unit_bytes in (8 * 4096 + 64, 1001, GEOMETRY.block_bytes):
        compare(unit_bytes, "cuda")
    raw = torch.zeros(GEOMETRY.total_bytes, dtype=torch.uint8, device="cuda")
    storage = Storage(raw, GEOMETRY)
    figures: dict[str, float | str] = {"device": torch.cuda.get_device_name()}
    half = raw.numel() // 4
    spent = seconds(lambda: raw[:half].copy_(raw[half : 2 * half]))
    figures["copy_ GB/s"] = round(2 * half / spent / 1e9)
    for side, unit, counts in (
        (Side.STATE, GEOMETRY.state_bytes, (1, 32)),
        (Side.BLOCK, GEOMETRY.block_bytes, (1, 32, 1024)),
    ):
        last = GEOMETRY.total_bytes // unit - 1
        zero = storage.zero_states if side is Side.STATE else storage.zero_blocks
        for count in counts:
            low, high = np.arange(1, count + 1), last - np.arange(count)
            moves = [Move(side, high, low)]
            spent = seconds(lambda moves=moves: storage.move(moves))
            figures[f"move {count} {side.value}s us"] = round(1e6 * spent, 1)
            figures[f"move {count} {side.value}s GB/s"] = round(2 * count * unit / spent / 1e9)
            spent = seconds(lambda low=low, zero=zero: zero(low))
            figures[f"zero {count} {side.value}s GB/s"] = round(count * unit / spent / 1e9)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
