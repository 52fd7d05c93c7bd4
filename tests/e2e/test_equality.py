"""Greedy tokens do not depend on the cache: under concurrency, aborts, eviction and retraction.

The reference is every prompt alone in a namespace of its own (`cache_salt`), which resumes nothing.
Then 500 requests drawn from these prompts run sixteen at a time through an arena that cannot hold
them; a third of the clients hang up or abort. Whatever is sent back, in full or in part, must be
the reference's tokens.
"""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import requests

from tests.e2e.prompts import words
from tests.e2e.server import ANSWER_S, Reply, body

pytestmark = pytest.mark.e2e

SEED = 7
REQUESTS = 500
CLIENTS = 16
LONGEST_REPLY = 24
ANSWER, ABORT, HANG_UP = "answer", "abort", "hang up"


@dataclass(frozen=True)
class Draw:
    """One request of the load."""

    number: int
    prompt: tuple[int, ...]
    new_tokens: int
    ending: str
    patience_s: float  # until the client aborts or hangs up


def stems():
    """Prompts that share prefixes of many lengths: 4 stems with 3 branches each, and loners."""
    draw = random.Random(SEED)
    for stem in range(4):
        shared = words(f"stem {stem}", draw.randint(40, 90))
        yield shared
        for branch in range(3):
            yield [*shared, *words(f"branch {stem} {branch}", draw.randint(10, 60))]
    for loner in range(8):
        yield words(f"loner {loner}", draw.randint(1, 120))


def second_turns(first):
    """Every other conversation goes on, from replies of different lengths."""
    draw = random.Random(SEED + 1)
    for number, (prompt, reply) in enumerate(list(first.items())[::2]):
        kept = reply[: draw.randint(1, LONGEST_REPLY)]
        yield [*prompt, *kept, *words(f"second turn {number}", draw.randint(3, 30))]


def references(server, prompts):
    """Replies without the cache, three at a time: nothing is evicted or retracted on their way."""

    def alone(prompt):
        reply = server.generate(prompt, LONGEST_REPLY, cache_salt=f"alone {hash(tuple(prompt))}")
        assert reply.cached_tokens == 0
        return tuple(prompt), reply.ids

    with ThreadPoolExecutor(3) as pool:
        return dict(pool.map(alone, prompts))


def load(prompts):
    """The shuffled requests."""
    draw = random.Random(SEED + 2)
    endings = [ANSWER] * 8 + [ABORT] * 2 + [HANG_UP] * 2
    return [
        Draw(
            number,
            draw.choice(prompts),
            draw.randint(1, LONGEST_REPLY),
            draw.choice(endings),
            draw.choice((0.0, 0.05, 0.2, 1.0)),
        )
        for number in range(REQUESTS)
    ]


def send(server, draw):
    """Carry out one request; its reply, or None where the client did not wait for one."""
    # Nothing but its length ends a reply, but admission does not know that and is optimistic.
    wanted = body(draw.prompt, draw.new_tokens, rid=f"draw-{draw.number:03}")
    wanted["sampling_params"]["ignore_eos"] = False
    if draw.ending == HANG_UP:
        hang_up(server, wanted, draw.patience_s)
        return None
    if draw.ending == ABORT:
        timer = threading.Timer(draw.patience_s, server.abort, (wanted["rid"],))
        timer.start()
    answer = server.post("/generate", wanted, timeout=ANSWER_S)
    return Reply.of(answer.json())


def hang_up(server, wanted, patience_s):
    """Close the connection at the first sign of an answer, or when patience ends."""
    with (
        contextlib.suppress(requests.RequestException),
        requests.post(
            f"{server.base_url}/generate",
            json={**wanted, "stream": True},
            stream=True,
            timeout=(30.0, max(patience_s, 0.01)),
        ) as answer,
    ):
        next(answer.iter_content(1), None)


@pytest.fixture(scope="module")
def truth(tight):
    """Prompt -> uncached reply."""
    tight.flush()
    before = tight.settle()
    first = references(tight, stems())
    found = {**first, **references(tight, second_turns(first))}
    after = tight.settle()
    assert after.since(before, "kimi_k3:resumed_tokens_total") == 0
    assert after.since(before, "kimi_k3:retracted_requests_total") == 0
    return found


def test_shuffled_load_with_aborts(tight, truth):
    tight.flush()
    before = tight.settle()
    draws = load(list(truth))
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(lambda draw: send(tight, draw), draws))

    ended = {"length": 0, "abort": 0, "hang up": 0}
    for draw, reply in zip(draws, replies, strict=True):
        if reply is None:
            ended["hang up"] += 1
            continue
        ended[reply.finish] += 1
        assert reply.finish == "length" or draw.ending == ABORT, (draw, reply)
        wanted = truth[draw.prompt][: draw.new_tokens]
        assert reply.ids == wanted[: len(reply.ids)], (draw, reply, wanted)
        assert reply.finish == "abort" or len(reply.ids) == draw.new_tokens, (draw, reply)
    assert ended["length"] > REQUESTS // 2, ended
    assert ended["abort"] > 10, ended

    after = tight.assert_idle_books()
    grown = {name: value - before[name] for name, value in after.items() if name in before}
    assert grown["kimi_k3:checkpoints_evicted_total"] > 0
    assert grown["kimi_k3:evicted_kv_tokens_total"] > 0
    assert grown["kimi_k3:retracted_requests_total"] > 0
    assert grown["kimi_k3:resumed_tokens_total"] > 0
    for kind in ("prompt_end", "turn_end", "retract"):
        assert grown[f'kimi_k3:checkpoints_taken_total{{kind="{kind}"}}'] > 0, kind
    # Counted once each, retracted or not; only requests that never ran are not counted.
    answered = sum(len(d.prompt) for d, r in zip(draws, replies, strict=True) if r and r.ids)
    assert answered <= grown["kimi_k3:input_tokens_total"] <= sum(len(d.prompt) for d in draws)


def test_every_prompt_again_with_a_warm_cache(tight, truth):
    """One at a time, twice: whatever is resumed, the tokens are the same.

    Which states an arena of eight keeps is the policy's business; that some are used is not.
    """
    tight.flush()
    resumed = 0
    for prompt, reply in truth.items():
        cold = tight.generate(prompt, 8)
        warm = tight.generate(prompt, 8)
        assert cold.ids == warm.ids == reply[:8]
        resumed += warm.cached_tokens
    assert resumed > 0
