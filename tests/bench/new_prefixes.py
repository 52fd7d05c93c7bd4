"""A trace of new shared prefixes among strangers: `python -m tests.bench.new_prefixes FILE`.

Ten prompts a second share nothing; every fifth brings a prefix of 2,000 to 20,000 new tokens, which
2 to 5 prompts begin with, within 2.5 s.  For the simulator: what states are worth that a prefill
leaves before anybody shares them.

    python -m radix.sim FILE --dense 64 --capacity 16g,32g,64g,128g
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

STRANGERS, EVERY, APART_MS = 400, 5, 100
BLOCK = 64  # tokens


def rows(seed: int) -> list[dict]:
    """All requests in the order in which they come."""
    source, ids = random.Random(seed), itertools.count()
    found: list[dict] = []

    def ask(unit: float, own_len: int, shared: list[int]) -> None:
        blocks = [*shared, *itertools.islice(ids, -(-own_len // BLOCK))]
        found.append(
            {
                "timestamp": round(unit * APART_MS),
                "input_length": len(shared) * BLOCK + own_len,
                "output_length": 1,
                "block_size": BLOCK,
                "hash_ids": blocks,
            }
        )

    for stranger in range(STRANGERS):
        ask(stranger, source.randint(3000, 12_000), [])
        if stranger % EVERY == 0:
            shared = list(itertools.islice(ids, source.randint(2000, 20_000) // BLOCK))
            for turn in range(source.randint(2, 5)):
                ask(
                    stranger + 0.5 + turn * source.uniform(0.5, 6),
                    source.randint(500, 3000),
                    shared,
                )
    return sorted(found, key=lambda row: row["timestamp"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args()
    with parsed.file.open("w") as out:
        for row in rows(parsed.seed):
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
