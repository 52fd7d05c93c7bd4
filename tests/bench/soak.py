"""Random load with aborts against a running server: `python -m tests.bench.soak --url URL`.

Clients hold conversations that share prefixes, branch, repeat and are dropped in the middle of an
answer; in an arena small enough, running requests are retracted (they may end early, so SGLang
admits them on an estimate; `--schedule-conservativeness 0.1` on the server makes it a bad one, and
`SGLANG_TEST_RETRACT=1 SGLANG_TEST_RETRACT_INTERVAL=97` retracts at every 97th step regardless).
Afterwards, idle, a sample of prompts is sent alone, as cached, under a key of its own, and so with
64 other tokens near its end: the first two must score tokens alike, compared with the third
(`agree`).  Whether SGLang's idle checks stayed silent is in the server's log (`--log`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import threading
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import agree
from tests.bench.load import generate, random_tokens, rank_of

PREFIXES, LONGEST_PREFIX = 12, 6000  # of them and tokens
SAMPLE = 40  # prompts that are asked again afterwards
TROUBLE = re.compile(
    r"leak|violat|Traceback|Scheduler hit an exception|CUDA error|assert", re.IGNORECASE
)


@dataclass
class Soak:
    """What all clients share."""

    url: str
    end: float
    longest: int
    new: int
    seed: int
    dp: int = 1
    served: int = 0
    aborted: int = 0
    errors: list[str] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def client(self, serial: int) -> None:
        """One client's conversations."""
        source = random.Random(self.seed * 1000 + serial)
        rank = rank_of(serial, self.dp)
        shared = random.Random(self.seed)
        most = min(LONGEST_PREFIX, self.longest)
        heads = [random_tokens(shared, shared.randrange(50, most)) for _ in range(PREFIXES)]
        history: list[int] = []
        while time.monotonic() < self.end:
            if not history or len(history) > self.longest or source.random() < 0.1:
                head = source.choice(heads)
                history = head[: source.randrange(1, len(head) + 1)]
            elif source.random() < 0.1:
                history = history[: source.randrange(1, len(history) + 1)]
            prompt = history + random_tokens(source, source.randrange(1, 900))
            try:
                if source.random() < 0.15:
                    self._abandon(prompt, source.random() * 0.6, rank)
                    self.aborted += 1
                    continue
                new = source.randrange(1, self.new)
                output, _ = generate(self.url, prompt, new, may_end=True, dp_rank=rank)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                with self.guard:
                    self.errors.append(repr(error)[:200])
                if len(self.errors) > 50:
                    return
                time.sleep(0.5)
                continue
            history = prompt + output
            with self.guard:
                self.served += 1
                if len(self.kept) < SAMPLE:
                    self.kept.append(prompt)
                elif source.random() < SAMPLE / self.served:  # all equally likely
                    self.kept[source.randrange(SAMPLE)] = prompt

    def _abandon(self, prompt: list[int], after_s: float, rank: int | None) -> None:
        """Send a request and hang up."""
        address = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        body = {
            "input_ids": prompt,
            "stream": True,
            "routed_dp_rank": rank,
            "sampling_params": {"max_new_tokens": 500, "temperature": 0},
        }
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/generate", json.dumps(body), headers)
        time.sleep(after_s)
        connection.close()


def compare(url: str, prompts: list[list[int]], dp: int) -> dict:
    """Each prompt alone, cached and uncached; the replicas take turns."""
    assert prompts, "no request was served"
    server, source = agree.Server(url), random.Random(len(prompts))
    cached_tokens, resumed, wrong = 0, [], []
    for at, prompt in enumerate(prompts):
        rank = rank_of(at, dp)
        generate(url, prompt, 1, dp_rank=rank)  # so that there is something to resume
        cached, depth = server.scores(prompt, cached=True, dp_rank=rank)
        assert depth > 0, f"nothing resumed of a prompt of {len(prompt)} tokens sent just before"
        alone, _ = server.scores(prompt, cached=False, dp_rank=rank)
        cached_tokens += depth
        resumed.append(agree.apart(cached, alone))
        other = agree.another_prefix(prompt, len(prompt) - 1, source)
        wrong.append(agree.apart(server.scores(other, cached=False, dp_rank=rank)[0], alone))
    agree.heard(wrong)
    return {
        "prompts": len(prompts),
        "cached_tokens": cached_tokens,
        "apart": agree.summary(resumed),
        "another_prefix_apart": agree.summary(wrong),
        "agree": agree.alike(resumed, wrong),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--longest", type=int, default=12_000)
    parser.add_argument("--new", type=int, default=400, help="tokens of an answer, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="attention replicas of the server")
    parser.add_argument("--log", type=Path, help="the server's log, searched for trouble")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    end = time.monotonic() + 60 * parsed.minutes
    soak = Soak(parsed.url, end, parsed.longest, parsed.new, parsed.seed, parsed.dp)
    threads = [
        threading.Thread(target=soak.client, args=(serial,)) for serial in range(parsed.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(5)  # idle: the checks run
    figures = {
        "minutes": parsed.minutes,
        "served": soak.served,
        "aborted": soak.aborted,
        "errors": soak.errors[:10],
        "sample": agree.told(lambda: compare(parsed.url, soak.kept, parsed.dp)),
    }
    if parsed.log:
        text = parsed.log.read_text(errors="replace")
        figures["retractions"] = len(re.findall(r"KV cache pool is full. Retract", text))
        figures["retractions_tested"] = len(re.findall("Testing retraction", text))
        figures["prefills_gave_way"] = len(re.findall("gives way", text))
        figures["trouble"] = [row[:300] for row in text.splitlines() if TROUBLE.search(row)][:10]
        # Ranks of one attention group must tell the same, each replica something else.
        figures["last_idle"] = dict(
            re.findall(r"^\[\S+ \S+ ?(.*?)\] kimi_k3 idle after (.*)$", text, re.MULTILINE)
        )
    print(json.dumps(figures))
    if parsed.json:
        parsed.json.write_text(json.dumps(figures, indent=1) + "\n")
    agreed = figures["sample"].get("agree") == len(soak.kept)
    sys.exit(bool(soak.errors or figures.get("trouble") or not agreed))


if __name__ == "__main__":
    main()
