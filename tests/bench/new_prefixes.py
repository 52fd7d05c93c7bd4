"""New shared prefixes among strangers: `python -m tests.bench.new_prefixes [--states N,...]`.

Every fifth of 400 prompts brings a prefix of 2,000 to 20,000 new tokens which 1 to 4 more soon
share; the others share nothing.  Four prefill at a time, in chunks, over K3's bytes on a TP 8 rank.
Prints the token hit rate by pool size, the mean of two seeds, with what evictions and states it
took: what opportunistic states are worth where memory is full of earlier ones.  No clock but the
microseconds of host time a state, which are this machine's.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from mempool import Geometry, Pool
from radix import CacheConfig, Kind, PrefixCache, admit
from tests.bench.machine import commit, machine

if TYPE_CHECKING:
    from radix.tokens import TokenArray

STATE_BYTES, TOKEN_BYTES, BLOCK = 56_171_520, 27_648, 64
PROMPTS, EVERY, AT_ONCE, CHUNK = 400, 5, 4, 8192
VOCABULARY = 1 << 30


def load(seed: int) -> list[TokenArray]:
    """All prompts in the order in which they come."""
    source = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> TokenArray:
        return source.integers(0, VOCABULARY, int(source.integers(least, most)))

    timed: list[tuple[float, TokenArray]] = []
    for number in range(PROMPTS):
        if number % EVERY == 0:
            shared = tokens(2000, 20_001)
            for turn in range(int(source.integers(2, 6))):
                at = number + 0.5 + turn * source.uniform(0.5, 6)
                timed.append((at, np.concatenate([shared, tokens(500, 3000)])))
        timed.append((float(number), tokens(3000, 12_001)))
    return [prompt for _, prompt in sorted(timed, key=lambda pair: pair[0])]


def play(states: int, dense: int, seed: int) -> dict[str, float]:
    """Serve the load from a pool of so many states."""
    geometry = Geometry(states * STATE_BYTES, STATE_BYTES, TOKEN_BYTES * BLOCK, BLOCK)
    pool = Pool(geometry)
    reserve = geometry.max_blocks // 8
    cache = PrefixCache(
        pool,
        CacheConfig(
            block_size=BLOCK,
            grid=64,
            opportunistic=4096,
            dense=dense,
            reserve_states=2,
            reserve_blocks=reserve,
        ),
    )
    todo, running = deque(load(seed)), deque()
    total = resumed = stops = 0
    seconds = 0.0
    while todo or running:
        while todo and len(running) < AT_ONCE:
            lease = admit(cache, pool, todo[0], None)
            if lease is None:
                break
            running.append((lease, todo.popleft(), lease.match.resume_len))
            total += lease.match.prompt_len
            resumed += lease.match.resume_len
        lease, prompt, done = running.popleft()
        done = min(done + CHUNK, len(prompt))
        due = [stop for stop in lease.stops if stop.depth <= done]
        start = time.perf_counter()
        for stop in due:
            lease.take(stop)
        if lease.offers:
            lease.commit(prompt[:done])
        seconds += time.perf_counter() - start
        stops += len(due)
        if done < len(prompt):
            running.append((lease, prompt, done))
        else:
            lease.finish(prompt)
    assert not cache.violations()
    report = cache.report()
    return {
        "hit rate, %": 100 * resumed / total,
        "evicted": sum(report.evicted.values()),
        "extras": report.taken[Kind.OPPORTUNISTIC],
        "us/state": 1e6 * seconds / stops,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--states", default="300,600,1200,2500", help="pool sizes")
    parser.add_argument("--dense", type=int, default=64, help="tokens; 0: states cost a cut")
    parsed = parser.parse_args()
    print(f"{machine()}, commit {commit()}")
    for states in map(int, parsed.states.split(",")):
        rounds = [play(states, parsed.dense, seed) for seed in range(2)]
        row = {name: fmean(one[name] for one in rounds) for name in rounds[0]}
        print(
            f"{states:6d} states  ", "  ".join(f"{k} {v:.1f}" for k, v in row.items()), flush=True
        )


if __name__ == "__main__":
    main()
