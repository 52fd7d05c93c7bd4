"""Closed-loop chat load against a running server: `python -m tests.bench.load --url URL ...`.

Each client plays whole sessions of a trace, one turn after the other: a turn's prompt is the
previous prompt, the answer this server gave, and the trace's new tokens.  Token ids are made from
the trace's block ids, so sharing between sessions is the trace's.  Only the standard library is
used, so that it runs wherever the server runs.

A closed loop asks more of the faster server, whose decode batches are then larger.  With `--pace`
a client sends a turn every so many seconds, so that two servers that keep up do the same work.

Prints one line and, with `--json`, writes the figures: TTFT, inter-token latency (ITL: the gap
before an event, shared among its tokens, as SGLang's `bench_serving` counts it) and time per output
token (TPOT: mean gap of a request; p50, p95 of each), output tokens per second, token hit rate
(cached prompt tokens / prompt tokens).
"""

from __future__ import annotations

import argparse
import functools
import gzip
import http.client
import json
import queue
import random
import statistics
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCABULARY = 30_000
FIRST_TOKEN = 10
SHORT_PROMPT, LONG_ANSWER = 128, 512  # tokens, where only decoding is measured
# Tokens in an event there: a Python process that serves 32 streams of 300 events a second is
# slower than the decode steps of a small model.
STREAM_INTERVAL = 16
LATE_S = 0.01  # a paced turn sent so long after it was due is late


@dataclass(frozen=True)
class Turn:
    """One request: the tokens it adds to the conversation, and how many it asks for."""

    new_tokens: list[int]
    output_length: int


@dataclass
class Result:
    """What one request saw."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    gaps_s: list[float] = field(default_factory=list)  # one per token behind the first event
    output_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Seconds per output token behind the first event; 0.0 if none came."""
        return sum(self.gaps_s) / max(len(self.gaps_s), 1)

    def note(self, waited_s: float, output_tokens: int) -> bool:
        """Note an event that came so long after the last new token (the first: after the request).

        False if it brings no new token: the wait goes on.
        """
        new = output_tokens - self.output_tokens
        if new <= 0:
            return False
        if self.output_tokens == 0:
            self.ttft_s = waited_s
        else:
            self.gaps_s += [waited_s / new] * new
        self.output_tokens = output_tokens
        return True


def rows(path: Path) -> Iterator[dict]:
    """Trace rows with full `hash_ids` (delta rows name how many blocks they keep)."""
    previous: dict[int, list[int]] = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            kept = row.pop("prefix_blocks", None)
            if kept is not None:
                row["hash_ids"] = previous.get(row["session"], [])[:kept] + row["hash_ids"]
                previous[row["session"]] = row["hash_ids"]
            yield row


@functools.cache
def block_tokens(block: int, size: int) -> list[int]:
    """Token ids of a block: equal ids give equal tokens."""
    state = block * 2_654_435_761 % (1 << 32)
    out = []
    for _ in range(size):
        state = (state * 1_664_525 + 1_013_904_223) % (1 << 32)
        out.append(FIRST_TOKEN + (state >> 8) % (VOCABULARY - FIRST_TOKEN))
    return out


@functools.cache
def sessions(path: Path, *, count: int, longest: int) -> list[list[Turn]]:
    """The first `count` sessions that have at least two turns within `longest` tokens."""
    turns: dict[int, list[Turn]] = {}
    known: dict[int, int] = {}  # tokens of the conversation after the session's last turn
    closed: set[int] = set()
    for row in rows(path):
        session, size = row["session"], row["block_size"]
        start = known.get(session, 0)
        if session in closed or row["input_length"] <= start:
            continue
        if row["input_length"] + row["output_length"] > longest:
            closed.add(session)
            continue
        first = start // size
        tokens = [t for block in row["hash_ids"][first:] for t in block_tokens(block, size)]
        new = tokens[start - first * size : row["input_length"] - first * size]
        turns.setdefault(session, []).append(Turn(new, row["output_length"]))
        known[session] = row["input_length"] + row["output_length"]
    usable = [found for _, found in sorted(turns.items()) if len(found) > 1]
    return usable[:count]


def random_tokens(source: random.Random, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids of no text."""
    return [source.randrange(FIRST_TOKEN, vocabulary) for _ in range(count)]


def post(url: str, body: dict | None = None) -> bytes:
    """POST JSON, answered whole."""
    request = urllib.request.Request(
        url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return answer.read()


def generate(
    url: str,
    prompt: list[int],
    output_length: int,
    *,
    extra_key: str | None = None,
    dp_rank: int | None = None,
    may_end: bool = False,
    stream_interval: int = 1,
) -> tuple[list[int], Result]:
    """One streamed greedy request; returns its output ids and what was measured.

    A new `extra_key` shares no prefix with any other request.  Under DP attention each rank has a
    cache of its own; without a `dp_rank` the server chooses.  SGLang admits one that may end early
    (`may_end`) on an estimate of its output, and retracts it if the estimate was too low.  Events
    behind the first bring `stream_interval` tokens each.
    """
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    body = {
        "input_ids": prompt,
        "stream": True,
        "extra_key": extra_key,
        "routed_dp_rank": dp_rank,
        "sampling_params": {
            "max_new_tokens": output_length,
            "temperature": 0,
            "ignore_eos": not may_end,
            "stream_interval": stream_interval,
        },
    }
    last = time.perf_counter()
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == http.client.OK, response.read()[:500]
    result = Result(len(prompt), 0, 0.0)
    output: list[int] = []
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        assert "error" not in event, f"refused: {event['error']}"
        meta = event["meta_info"]
        ended = meta.get("finish_reason") or {}
        assert ended.get("type") != "abort", f"refused or given up: {ended.get('message')}"
        if result.note(now - last, meta["completion_tokens"]):
            last = now
        ids = event["output_ids"]  # all of them, or (`--incremental-streaming-output`) new ones
        output = ids if len(ids) == result.output_tokens else output + ids
        result.cached_tokens = meta["cached_tokens"]
    connection.close()
    return output[-result.output_tokens :], result


def rank_of(serial: int, dp: int) -> int | None:
    """The attention replica that serves a client all the time; None if there is only one."""
    return serial % dp if dp > 1 else None


@dataclass
class Pace:
    """When a client's turns are due: from `due` on, one every `every_s` seconds; 0: at once."""

    due: float
    every_s: float
    late: int = 0  # turns sent after they were due, because the one before was still answered

    def wait(self, end: float) -> bool:
        """Sleep until the next turn is due; False, at once, if that is after the end."""
        now = time.perf_counter()
        if max(now, self.due) > end:
            return False
        if self.every_s:
            self.late += now - self.due > LATE_S
            time.sleep(max(self.due - now, 0.0))
            self.due += self.every_s
        return True


@dataclass
class Seen:
    """What all clients saw."""

    results: list[Result] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def play(
    ask: Callable[[list[int], int], tuple[list[int], Result]],
    todo: queue.SimpleQueue,
    seen: Seen,
    pace: Pace,
    end: float,
) -> None:
    """One client: whole sessions until none is left, a request fails or the time is over."""
    while True:
        try:
            turns = todo.get_nowait()
        except queue.Empty:
            return
        history: list[int] = []
        for turn in turns:
            if not pace.wait(end):
                return
            history += turn.new_tokens
            try:
                output, result = ask(history, turn.output_length)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                seen.failures.append(repr(error)[:300])
                return
            seen.results.append(result)
            history += output


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {"p50": 1e3 * statistics.median(seconds), "p95": 1e3 * percentile(seconds, 0.95)}


def run(
    url: str,
    trace: Path,
    *,
    clients: int,
    count: int,
    longest: int,
    seconds: float = 600,
    dp: int = 1,
    pace_s: float = 0.0,
) -> dict:
    """Play the load, at most so long; returns the figures.

    With `dp` attention replicas each client stays on one of them, in turn; with `pace_s` it sends a
    turn every so many seconds.
    """
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for turns in sessions(trace, count=count, longest=longest):
        todo.put(turns)
    figures = closed_loop(url, todo, clients, seconds=seconds, dp=dp, pace_s=pace_s)
    return {"trace": trace.name, **figures}


def decode_only(url: str, *, clients: int, seed: int) -> dict:
    """As many answers at once, of short prompts that share nothing: decode steps of one batch.

    In a closed loop the server with the faster prefills decodes for more clients at once, so each
    of its steps has more to do; here batches are the same.  An event brings `STREAM_INTERVAL`
    tokens, so that ITL's p95 here is of means of so many steps.  Another seed, other prompts.
    """
    source = random.Random(seed)
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for _ in range(clients):
        todo.put([Turn(random_tokens(source, SHORT_PROMPT), LONG_ANSWER)])
    return closed_loop(url, todo, clients, stream_interval=STREAM_INTERVAL)


def closed_loop(
    url: str,
    todo: queue.SimpleQueue,
    clients: int,
    *,
    seconds: float = 600,
    dp: int = 1,
    pace_s: float = 0.0,
    stream_interval: int = 1,
) -> dict:
    """Play all sessions by so many clients, begun within `seconds`; returns the figures."""
    seen = Seen()
    start = time.perf_counter()
    paces = [Pace(start + pace_s * serial / clients, pace_s) for serial in range(clients)]
    threads = []
    for serial, pace in enumerate(paces):
        ask = functools.partial(
            generate, url, dp_rank=rank_of(serial, dp), stream_interval=stream_interval
        )
        threads.append(threading.Thread(target=play, args=(ask, todo, seen, pace, start + seconds)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    return summary(seen, clients, elapsed, sum(pace.late for pace in paces))


def summary(seen: Seen, clients: int, elapsed: float, late: int) -> dict:
    """The figures of a load that took so many seconds."""
    results = seen.results
    prompt = sum(result.prompt_tokens for result in results) or 1
    gaps = [gap for result in results for gap in result.gaps_s] or [0.0]
    ttfts = [result.ttft_s for result in results] or [0.0]
    tpots = [result.tpot_s for result in results if result.gaps_s] or [0.0]
    return {
        "clients": clients,
        "requests": len(results),
        "failures": seen.failures,
        "late": late,
        "seconds": round(elapsed, 3),
        "prompt_tokens": prompt,
        "token_hit_rate": sum(result.cached_tokens for result in results) / prompt,
        "ttft_ms": milliseconds(ttfts),
        "itl_ms": milliseconds(gaps),
        "tpot_ms": milliseconds(tpots),
        "output_tokens_per_s": sum(result.output_tokens for result in results) / elapsed,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--longest", type=int, default=32_768, help="tokens of one conversation")
    parser.add_argument("--seconds", type=float, default=600, help="start no request after that")
    parser.add_argument("--dp", type=int, default=1, help="attention replicas of the server")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between a client's turns")
    parser.add_argument("--label", default="")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    figures = run(
        parsed.url,
        parsed.trace,
        clients=parsed.clients,
        count=parsed.sessions,
        longest=parsed.longest,
        seconds=parsed.seconds,
        dp=parsed.dp,
        pace_s=parsed.pace,
    )
    figures["label"] = parsed.label
    print(json.dumps(figures))
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
