"""Whether a server answers from its cache what it answers without: `python -m tests.bench.agree`.

`--url URL [--against URL] [--json F]`.  Random prompts; of each the log probabilities of some
tokens at its end, computed whole (a key of its own), resumed in its middle, resumed at its end,
and, after an answer, resumed where decoding left off.  They differ by what kernels round in another
order; how much a wrong state would do shows a prompt of which the 64 tokens before the middle are
others.  With `--against` also by what another server computes of the same prompts.

The servers need weights under which answers depend on their prompts (`weights.py`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.load import FIRST_TOKEN, post, random_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = 8
LONGEST = 6000  # tokens
ANSWER = 24  # tokens
ASKED = list(range(FIRST_TOKEN, FIRST_TOKEN + 64))  # tokens whose probability is compared
FOLLOWS = 7  # tokens after an answer
AUDIBLE = 0.1  # nats, what another prefix must change at least
WRONG = 64  # other tokens before the middle, for how much a wrong state does


class Server:
    """One that answers `/generate`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, prompt: list[int], new: int = 1, **fields: Any) -> dict:
        """One greedy request, answered whole."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
            **fields,
        }
        return json.loads(post(f"{self.url}/generate", body))

    def scores(
        self,
        prompt: list[int],
        *,
        cached: bool,
        of: list[int] = ASKED,
        dp_rank: int | None = None,
    ) -> tuple[list[float], int]:
        """Log probabilities of some tokens behind the prompt, and how many of it were resumed."""
        fields: dict[str, Any] = {"return_logprob": True, "token_ids_logprob": of}
        if not cached:
            fields["extra_key"] = f"alone {time.time_ns()}"
        meta = self.ask(prompt, routed_dp_rank=dp_rank, **fields)["meta_info"]
        return [row[0] for row in meta["output_token_ids_logprobs"][0]], meta["cached_tokens"]


def apart(left: list[float], right: list[float]) -> float:
    """How far two answers are apart: the root of the mean square of their differences."""
    return statistics.fmean((a - b) ** 2 for a, b in zip(left, right, strict=True)) ** 0.5


def another_prefix(prompt: list[int], end: int, source: random.Random) -> list[int]:
    """The prompt with other tokens just before `end`."""
    start = max(0, end - WRONG)
    return prompt[:start] + random_tokens(source, end - start) + prompt[end:]


def summary(distances: list[float]) -> dict[str, float]:
    """For people; the least tells of a `wrong` one how little it may be."""
    return {
        "least": round(min(distances), 5),
        "median": round(statistics.median(distances), 5),
        "most": round(max(distances), 5),
    }


def compare(
    server: Server,
    other: Server | None,
    *,
    seed: int = 1,
    prompts: int = PROMPTS,
    longest: int = LONGEST,
) -> dict[str, Any]:
    """Distances by how an answer was computed, what was resumed, and how many prompts agree.

    A prompt agrees in one way if its answer is nearer to what was computed whole than a quarter of
    what another prefix does to the middle one of the prompts.

    Raises:
        AssertionError: another prefix hardly changes an answer, so that nothing can be told; a
            prompt with a key of its own was resumed, or one that should be was not.
    """
    source = random.Random(seed)
    found: dict[str, list[float]] = {}
    resumed: dict[str, list[int]] = {}

    def note(way: str, right: list[float], prompt: list[int]) -> None:
        scores, depth = server.scores(prompt, cached=True)
        found.setdefault(way, []).append(apart(scores, right))
        resumed.setdefault(way, []).append(depth)

    for _ in range(prompts):
        prompt = random_tokens(source, source.randrange(300, longest))
        middle = len(prompt) - source.randrange(10, 60)
        alone, depth = server.scores(prompt, cached=False)
        assert depth == 0, f"a prompt under a key of its own resumed {depth} tokens"
        server.ask(prompt[:middle])
        note("middle", alone, prompt)
        note("end", alone, prompt)
        answer = server.ask(prompt, ANSWER)["output_ids"]
        longer = prompt + answer + random_tokens(source, FOLLOWS)
        note("answer", server.scores(longer, cached=False)[0], longer)
        if other is not None:
            theirs, _ = other.scores(prompt, cached=False)
            found.setdefault("another server", []).append(apart(theirs, alone))
        elsewhere = another_prefix(prompt, middle, source)
        found.setdefault("another prefix", []).append(
            apart(server.scores(elsewhere, cached=False)[0], alone)
        )
    for way, depths in resumed.items():
        assert min(depths) > 0, f"nothing resumed ({way}): {depths}"
    wrong = found["another prefix"]
    heard(wrong)
    return {
        "apart": {way: summary(rows) for way, rows in found.items()},
        "resumed": resumed,
        "agree": {way: alike(rows, wrong) for way, rows in found.items() if rows is not wrong},
        "prompts": prompts,
    }


def alike(distances: list[float], wrong: list[float]) -> int:
    """How many are less than a quarter of what another prefix does, in the median: some prompts
    hardly depend on theirs."""
    return sum(distance < most_rounded(statistics.median(wrong)) for distance in distances)


def most_rounded(wrong: float) -> float:
    """How far apart what kernels round may bring two answers, if another prefix does so much."""
    return wrong / 4


def parted(
    server: Server,
    prompt: list[int],
    left: list[int],
    right: list[int],
    *,
    dp_rank: int | None = None,
) -> float:
    """How far apart, in nats, the tokens are with which two greedy answers part; 0.0: nowhere.

    Both are scored behind what the answers share, computed whole.  Near 0 one was as good as the
    other and rounding chose; what a wrong state chooses is far behind the best.
    """
    at = next((n for n, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
    if at is None:
        return 0.0
    scores, _ = server.scores(
        prompt + left[:at], cached=False, of=[left[at], right[at]], dp_rank=dp_rank
    )
    distance = abs(scores[0] - scores[1])
    assert math.isfinite(distance), f"log probabilities {scores} behind {len(prompt) + at} tokens"
    return distance


def told(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check finds, or why it could not be told: nothing was resumed, a server died."""
    try:
        return check()
    except (OSError, http.client.HTTPException, AssertionError) as error:
        return {"failed": repr(error)[:500]}


def heard(wrong: list[float]) -> None:
    """Raise if another prefix hardly changes an answer: SGLang's own dummy weights are loaded."""
    middle = statistics.median(wrong)
    assert middle > AUDIBLE, (
        f"another prefix moves an answer by {middle:.5f} only: does the server have the weights of "
        "tests/bench/weights.py (its log says 'Executed general plugin: bench_weights')?"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="answers from the cache, and without it")
    parser.add_argument("--url", required=True)
    parser.add_argument("--against", help="another server's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a prompt")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    other = Server(parsed.against) if parsed.against else None
    found = compare(
        Server(parsed.url),
        other,
        seed=parsed.seed,
        prompts=parsed.prompts,
        longest=parsed.longest,
    )
    print(json.dumps(found))
    if parsed.json:
        parsed.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(min(found["agree"].values()) < parsed.prompts)


if __name__ == "__main__":
    main()
