"""Prompts that share a prefix, turns, a burst: which tokens a server resumes.

`python -m tests.bench.shared_prefix --url URL [--dp-rank N] [--vocabulary N] [--json F]`: 4
prompts of 12,000 shared and 2,000 own tokens one after the other, the first again, two more turns
of the second, then a burst of 16 prompts with a new shared 12,000 and 1,500 own tokens, twice.
Greedy, 8 output tokens, token ids random but fixed.  The four prompts and the repeat are compared
with what the server samples of them computed whole: `outputs_equal`; else which part
(`outputs_parted`), and how far apart the two tokens are there at most (`outputs_apart`, nats):
rounding decides between tokens that are as good as tied.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench import agree, load

if TYPE_CHECKING:
    from collections.abc import Callable

NEW = 8


def run(url: str, dp_rank: int | None = None, vocabulary: int = load.VOCABULARY) -> dict:
    """Play the scenario; cached tokens of every request, and whether repeats sampled the same.

    Under DP attention `dp_rank` names the replica, and so the cache, that gets all requests.
    Raises AssertionError if a prompt under a key of its own was resumed.
    """
    server = agree.Server(url)
    generate = functools.partial(load.generate, dp_rank=dp_rank)
    tokens = functools.partial(load.random_tokens, random.Random(1), vocabulary=vocabulary)

    generate(url, tokens(14_000), NEW)  # compiles
    shared = tokens(12_000)
    prompts = [shared + tokens(2_000) for _ in range(4)]
    first = [generate(url, prompt, NEW) for prompt in prompts]
    again, repeat = generate(url, prompts[0], NEW)
    turn = prompts[1] + first[1][0] + tokens(150)
    answer, second = generate(url, turn, NEW)
    turn = turn + answer + tokens(150)
    _, third = generate(url, turn, NEW)

    shared = tokens(12_000)
    burst = [shared + tokens(1_500) for _ in range(16)]
    bursts = [at_once(lambda prompt: generate(url, prompt, NEW), burst) for _ in range(2)]
    # Alone and without a prefix: what the cached runs must have sampled.
    whole = [
        generate(url, prompt, NEW, extra_key=f"uncached {time.time_ns()}") for prompt in prompts
    ]
    resumed = [result.cached_tokens for _, result in whole]
    assert not any(resumed), f"prompts under keys of their own resumed {resumed} tokens"
    sampled = {f"prompt {at}": (at, found) for at, (found, _) in enumerate(first)}
    sampled["prompt 0 again"] = (0, again)
    apart = {
        name: agree.parted(server, prompts[at], whole[at][0], found, dp_rank=dp_rank)
        for name, (at, found) in sampled.items()
        if whole[at][0] != found
    }
    return {
        "four_prompts": [result.cached_tokens for _, result in first],
        "four_prompts_ttft_ms": [round(1e3 * result.ttft_s, 1) for _, result in first],
        "same_again": repeat.cached_tokens,
        "turn_2": second.cached_tokens,
        "turn_3": third.cached_tokens,
        "bursts": bursts,
        "outputs_equal": not apart,
        "outputs_parted": list(apart),
        "outputs_apart": max(apart.values(), default=0.0),
    }


def at_once(
    ask: Callable[[list[int]], tuple[list[int], load.Result]], prompts: list[list[int]]
) -> dict:
    """Send all prompts at the same time; what each resumed, and how long it took."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(ask, prompts))
    return {
        "cached": sorted(result.cached_tokens for _, result in results),
        "seconds": round(time.perf_counter() - start, 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--dp-rank", type=int, help="attention replica that gets all requests")
    parser.add_argument("--vocabulary", type=int, default=load.VOCABULARY, help="ids are below")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    figures = run(parsed.url, parsed.dp_rank, parsed.vocabulary)
    print(json.dumps(figures))
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
