"""Prompts that share a prefix, turns, a burst: which tokens a server resumes.

`python -m tests.bench.shared_prefix --url URL [--dp-rank N] [--json F]`: 4 prompts of 12,000
shared and 2,000 own tokens one after the other, the first again, two more turns of the second, then
a burst of 16 prompts with a new shared 12,000 and 1,500 own tokens, twice.  Greedy, 8 output
tokens, token ids random but fixed.  Whether repeats sampled the same (`outputs_equal`) says
something only where arithmetic does not depend on how a prompt is cut; elsewhere `agree` tells.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import random
import time
from pathlib import Path

from tests.bench import load

NEW = 8


def run(url: str, dp_rank: int | None = None) -> dict:
    """Play the scenario; cached tokens of every request, and whether repeats sampled the same.

    Under DP attention `dp_rank` names the replica, and so the cache, that gets all requests.
    """
    generate = functools.partial(load.generate, dp_rank=dp_rank)
    tokens = functools.partial(load.random_tokens, random.Random(1))

    outputs_equal = True
    generate(url, tokens(14_000), NEW)  # compiles
    shared = tokens(12_000)
    prompts = [shared + tokens(2_000) for _ in range(4)]
    first = [generate(url, prompt, NEW) for prompt in prompts]
    again, repeat = generate(url, prompts[0], NEW)
    outputs_equal &= again == first[0][0]
    turn = prompts[1] + first[1][0] + tokens(150)
    answer, second = generate(url, turn, NEW)
    turn = turn + answer + tokens(150)
    _, third = generate(url, turn, NEW)

    shared = tokens(12_000)
    burst = [shared + tokens(1_500) for _ in range(16)]
    bursts = []
    for _ in range(2):
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(burst)) as pool:
            results = list(pool.map(lambda prompt: generate(url, prompt, NEW), burst))
        bursts.append(
            {
                "cached": sorted(result.cached_tokens for _, result in results),
                "seconds": round(time.perf_counter() - start, 3),
            }
        )
    # Alone and without a prefix: what the cached runs must have sampled.
    for prompt, (sampled, _) in zip(prompts, first, strict=True):
        alone, result = generate(url, prompt, NEW, extra_key=f"uncached {time.time_ns()}")
        outputs_equal &= alone == sampled and result.cached_tokens == 0
    return {
        "four_prompts": [result.cached_tokens for _, result in first],
        "four_prompts_ttft_ms": [round(1e3 * result.ttft_s, 1) for _, result in first],
        "same_again": repeat.cached_tokens,
        "turn_2": second.cached_tokens,
        "turn_3": third.cached_tokens,
        "bursts": bursts,
        "outputs_equal": outputs_equal,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--dp-rank", type=int, help="attention replica that gets all requests")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    figures = run(parsed.url, parsed.dp_rank)
    print(json.dumps(figures))
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
