"""On a GPU: while a long forward runs, the arena does its whole work, and none of it waits.

The forward is a kernel that spins on the arena's stream.  If it is still running when everything
was enqueued, nothing waited for it.  Needs torch, Triton and a CUDA device, not SGLang.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from mempool import Geometry, Side
from mempool.storage import upload
from sgl_kimi_k3.arena import NO_IDS, Arena

GEOMETRY = Geometry(total_bytes=64 << 20, state_bytes=1 << 20, block_bytes=64 << 10, block_size=64)
SPIN_CYCLES = 6_000_000_000  # about three seconds


def work(arena: Arena) -> dict[tuple[Side, int], int]:
    """Every operation once, with moves of both kinds; what each live unit must hold at the end."""
    held: dict[tuple[Side, int], int] = {}

    def take(states: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
        grant = arena.alloc(states, blocks)
        for side, ids in ((Side.STATE, grant.states), (Side.BLOCK, grant.blocks)):
            rows = arena.storage.rows(side)
            for one, index in zip(
                ids.tolist(), arena.pool.table_of(side).index_of(ids).tolist(), strict=True
            ):
                stamp = held[side, one] = len(held) % 250 + 1
                with torch.cuda.stream(arena.stream):
                    rows[index].fill_(stamp)
        return grant.states, grant.blocks

    def drop(states: np.ndarray, blocks: np.ndarray) -> None:
        arena.free(states, blocks)
        for side, ids in ((Side.STATE, states), (Side.BLOCK, blocks)):
            for one in ids.tolist():
                del held[side, one]

    states, blocks = take(20, 650)
    drop(NO_IDS, blocks[::2])
    more, _ = take(15, 0)  # moves blocks
    drop(states[::2], NO_IDS)
    take(0, 200)  # moves states
    slot = arena.slots.of(int(more[0]))
    assert arena.slots.read_one(slot[0]) == more[0]
    arena.copy_states([(int(more[0]), int(more[1]))])
    held[Side.STATE, int(more[1])] = held[Side.STATE, int(more[0])]
    drop(more[5:9], NO_IDS)
    arena.compact(8 << 20)
    upload(np.arange(100_000), arena.device)
    return held


def check() -> str:
    """Warm up, then work behind the spinning kernel, then look at every byte."""
    stream = torch.cuda.Stream()
    raw = torch.zeros(GEOMETRY.total_bytes, dtype=torch.uint8, device="cuda")
    arena = Arena(raw, GEOMETRY, stream)
    work(arena)  # compiles the kernels
    arena.clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        done.record()
    held = work(arena)
    assert not done.query(), "something waited for the forward"
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert arena.pool.report().counters.moves > 0
    for side, device in ((Side.STATE, arena.states), (Side.BLOCK, arena.blocks)):
        table = arena.pool.table_of(side)
        assert np.array_equal(device.tensor.cpu().numpy(), table.homes)
        rows = arena.storage.rows(side)
        for (kind, one), stamp in held.items():
            if kind is side:
                assert bool((rows[int(table.index_of(one))] == stamp).all()), (side, one)
    return f"{len(held)} units, {arena.pool.report().counters.moves} moves, nothing waited"


if __name__ == "__main__":
    print(check())
