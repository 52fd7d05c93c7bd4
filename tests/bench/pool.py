"""The pool beside SGLang's own two-ended allocator: `python -m tests.bench.pool [--json F]`.

Both run the same recorded operations on CPU tensors of the same size, interleaved in slices, in one
process with one thread, timed in CPU seconds of that thread: other load on the machine counts less.
Both sides include what they do to the tensor on hand-out: moves, and zeroes where each deems them
needed (ours: bytes that change owner; the peer: every KV page). A call in which units moved counts
as a compaction, on both sides, and not as an alloc. Needs SGLang 0.5.23 and the traces.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from time import thread_time

import torch

from mempool import Geometry, Pool
from mempool.storage import Storage
from tests.bench.machine import commit, machine
from tests.bench.pool_ops import PAGE, STATES_A_REQUEST, Op, fill, read_trace, record, scaled
from tests.bench.pool_peer import Peer

SEQUENCES = (  # trace, requests, arena in tokens of KV
    ("airline-chat.jsonl.gz", 2454, 300_000),
    ("agentic-coding.jsonl.gz", 400, 4_000_000),
)
SLICE = 500  # operations each allocator runs before the other takes over
REPEATS = 5  # of which every class of operation counts with its least disturbed run
K3_TP8 = {"n_kda": 69, "n_mla": 24, "num_heads": 96, "head_dim": 128, "tp": 8}
ADMISSION_BYTES = 20 * 2**30
FULL_MEMORY_RATIO, STATIC_STATES_A_REQUEST = 0.9, 5  # SGLang's default and its overlap ratio


class Ours:
    """`Pool` and `Storage` under the peer's three verbs."""

    def __init__(self, geometry: Geometry) -> None:
        self.pool = Pool(geometry)
        self.storage = Storage(torch.zeros(geometry.total_bytes, dtype=torch.uint8), geometry)
        self.units = {}
        self.spent = 0.0  # CPU seconds of the last call, handles apart

    @property
    def moved_bytes(self) -> int:
        return self.pool.report().counters.moved_bytes

    def alloc(self, handle: int, states: int, blocks: int) -> bool:
        start = thread_time()
        grant = self.pool.alloc(states, blocks)
        if grant is not None:
            self.storage.apply(grant)
        self.spent = thread_time() - start
        if grant is not None:
            self.units[handle] = [grant.states, grant.blocks]
        return grant is not None

    def free(self, handle: int, states: int, blocks: int) -> None:
        slots, pages = self.units[handle]
        gone = slots[:states], pages[:blocks]
        start = thread_time()
        self.pool.free(*gone)
        self.spent = thread_time() - start
        self.units[handle] = [slots[states:], pages[blocks:]]

    def live_bytes(self) -> int:
        report = self.pool.report()
        return report.states.live_bytes + report.blocks.live_bytes


class Clock:
    """Seconds and calls by operation class."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.refused = 0

    def run(self, side, ops: list[Op], lost: set[int]) -> None:
        """Run a slice; what a handle lost to a refusal cannot be freed later."""
        for op in ops:
            if op.verb == "free" and op.handle in lost:
                continue
            size = "state" if op.states else "1_block" if op.blocks == 1 else "n_blocks"
            call = side.alloc if op.verb == "alloc" else side.free
            moved = side.moved_bytes
            done = call(op.handle, op.states, op.blocks)
            if done is False:
                self.refused += 1
                lost.add(op.handle)
            name = f"{op.verb}_{size}" if side.moved_bytes == moved else "compaction"
            self.seconds[name] = self.seconds.get(name, 0.0) + side.spent
            self.calls[name] = self.calls.get(name, 0) + 1

    def mean_us(self) -> dict[str, float]:
        return {n: round(1e6 * s / self.calls[n], 1) for n, s in sorted(self.seconds.items())}

    def alloc_free_seconds(self) -> float:
        return sum(self.seconds.values()) - self.seconds.get("compaction", 0.0)


def best(clocks: list[Clock]) -> Clock:
    """The lowest time of every class; the calls are the same in every run."""
    least = Clock()
    least.refused, least.calls = clocks[0].refused, clocks[0].calls
    assert all(clock.calls == least.calls for clock in clocks)
    least.seconds = {name: min(clock.seconds[name] for clock in clocks) for name in least.calls}
    return least


def sequence(name: str, requests: int, tokens: int) -> dict:
    """One recorded sequence through both allocators, `REPEATS` times; each class at its best."""
    geometry, ops = record(name, requests, tokens)
    runs = []
    for _ in range(REPEATS):
        ours, peer = Ours(geometry), Peer(geometry)
        clocks, lost = (Clock(), Clock()), (set(), set())
        for at in range(0, len(ops), SLICE):
            for side, clock, gone in zip((ours, peer), clocks, lost, strict=True):
                clock.run(side, ops[at : at + SLICE], gone)
        assert ours.pool.violations() == []
        assert clocks[0].refused == 0, "the recorder promised that every demand fits"
        runs.append(clocks)
    mine, theirs = (best(list(clocks)) for clocks in zip(*runs, strict=True))
    return {
        "trace": name.removesuffix(".jsonl.gz"),
        "arena_tokens": tokens,
        "operations": len(ops),
        "ours_us": mine.mean_us(),
        "peer_us": theirs.mean_us(),
        "ours_calls": mine.calls,
        "peer_calls": theirs.calls,
        "ours_alloc_free_seconds": mine.alloc_free_seconds(),
        "peer_alloc_free_seconds": theirs.alloc_free_seconds(),
        "ours_bytes_moved": ours.moved_bytes,
        "peer_bytes_moved": peer.moved_bytes,
        "peer_refused": theirs.refused,
    }


def utilisation(tokens: int = 4_000_000) -> dict[str, float]:
    """Live bytes and the block that did not fit, over the whole arena, once nothing fits any more.

    Requests give back part of what they took, so holes are everywhere; nothing is evicted.
    """
    geometry = scaled(tokens)
    found = {}
    for label, side in (("ours", Ours(geometry)), ("peer", Peer(geometry))):
        for handle, (states, blocks, back) in enumerate(fill("airline-chat.jsonl.gz", 2454)):
            if not side.alloc(handle, states, blocks):
                break
            side.free(handle, back, 0)
            if handle % 3 == 0:
                side.free(handle, 0, blocks // 2)
        else:
            raise AssertionError(f"{label}: the trace ends before the arena is full")
        extra = -1
        while side.alloc(extra, 0, 1):
            extra -= 1
        found[label] = (side.live_bytes() + geometry.block_bytes) / geometry.total_bytes
    return found


def concurrency(total_bytes: int = ADMISSION_BYTES) -> dict[str, float]:
    """Consecutive requests of the airline trace that run at once, from every 50th request on.

    Nothing is shared or cached: every request brings its whole prompt and answer. Ours holds one
    live and two tracking states each; the static split reserves five and caps the number.
    """
    geometry = Geometry.of_model(total_bytes, **K3_TP8)
    blocks = [
        geometry.blocks_of(row["input_length"] + row["output_length"])
        for row in read_trace("airline-chat.jsonl.gz", 2454)
    ]
    share = FULL_MEMORY_RATIO / (1 + FULL_MEMORY_RATIO)
    cap = int(total_bytes * share / geometry.state_bytes) // STATIC_STATES_A_REQUEST
    kv_blocks = int(total_bytes * (1 - share) / geometry.block_bytes)
    ours, static = [], []
    for first in range(0, len(blocks) - 500, 50):
        pool, count = Pool(geometry), 0
        while pool.alloc(STATES_A_REQUEST, blocks[first + count]) is not None:
            count += 1
        ours.append(count)
        room, count = kv_blocks, 0
        while count < cap and room >= blocks[first + count]:
            room -= blocks[first + count]
            count += 1
        static.append(count)
    return {"ours": sum(ours) / len(ours), "static": sum(static) / len(static), "static_cap": cap}


def run() -> dict:
    """Everything, with the four ratios the requirements name."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or collections walk the million objects that importing SGLang leaves
    with torch.inference_mode():
        sequences = [sequence(*one) for one in SEQUENCES]
        used = utilisation()
    running = concurrency()

    def both(figure: str) -> tuple[float, float]:
        return tuple(sum(s[f"{side}_{figure}"] for s in sequences) for side in ("ours", "peer"))

    ours, peer = both("alloc_free_seconds")
    moved, peer_moved = both("bytes_moved")
    return {
        "alloc_free_speedup": round(peer / ours, 2),
        "bytes_moved_ratio": round(moved / peer_moved, 4),
        "utilisation_at_refusal": round(used["ours"], 5),
        "concurrency_ratio": round(running["ours"] / running["static"], 3),
        "peer_utilisation_at_refusal": round(used["peer"], 5),
        "running_at_once": running,
        "sequences": sequences,
        "page_tokens": PAGE,
        "command": "python -m tests.bench.pool",
        "commit": commit(),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    path = parser.parse_args().json
    figures = run()
    text = json.dumps(figures, indent=2)
    print(text)
    if path:
        path.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
