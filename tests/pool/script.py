"""One long scripted run of a pool; prints a hash of every answer. Run by test_determinism."""

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mempool import Geometry, Pool, Step


def run(seed: int, steps: int) -> str:
    """Hash of all grants, moves and reports of `steps` pseudo-random calls."""
    pool = Pool(Geometry(40_000, 900, 70, 4))
    held: dict[str, list[int]] = {"states": [], "blocks": []}
    digest = hashlib.sha256()

    def draw(below: int) -> int:
        nonlocal seed
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        return (seed >> 33) % below

    def drop(kind: str, count: int) -> list[int]:
        return [held[kind].pop(draw(len(held[kind]))) for _ in range(min(count, len(held[kind])))]

    for step in range(steps):
        grant = pool.alloc(draw(3), draw(40))
        digest.update(repr(grant).encode())
        if grant is not None:
            held["states"] += grant.states.tolist()
            held["blocks"] += grant.blocks.tolist()
        if grant is None or draw(3) == 0:
            pool.free(drop("states", draw(8)), drop("blocks", draw(120)))
        if draw(4) == 0:
            pool.retire(drop("states", draw(2)), drop("blocks", draw(9)), Step(step))
        pool.drain(Step(step - 3))
        digest.update(repr(pool.compact(draw(2000))).encode())
        digest.update(repr(pool.report()).encode())
    assert pool.violations() == []
    counters = pool.report().counters
    assert counters.moves > 0
    assert counters.refusals > 0
    return digest.hexdigest()


if __name__ == "__main__":
    print(run(seed=int(sys.argv[1]), steps=600))
