"""More conversations than fit, in simulated time: `python -m tests.bench.crowd --trace F ...`.

Closed-loop clients play whole sessions of a trace (`tests.bench.load`) against one scheduler:
SGLang's own requests, `SchedulePolicy` and `PrefillAdder` over our tree, pool and gate, on a device
without values.  Answers are fresh tokens.  Only time is a model, fitted to the H200 figures of
docs/gpu-log.md (`kimi_linear_8l`): a pass takes what `Costs` says, its result is processed while
the next one runs, and a client needs a moment before its next turn arrives.  Same arguments, same
figures, on any machine.

Prints a line for each number of clients and policy.  TTFT counts from the end of the turn before;
overtaken are the admissions of requests that came later.  `--json` receives the figures with
machine, commit and command.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import sys
from array import array
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.allocation import alloc_token_slots

from sgl_kimi_k3 import state_pass
from sgl_kimi_k3.config import Options
from tests.bench import load
from tests.bench.machine import commit, machine
from tests.plugin.fake_device import fake_device
from tests.plugin.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import SimpleNamespace

    from sglang.srt.managers.schedule_batch import Req

    from tests.bench.load import Turn

STATE_BYTES, TOKEN_BYTES = 6_512_640, 2_304  # of kimi_linear_8l
CONVOLUTION_BYTES = 12  # of a state in the world's pool
POLICIES = ("fcfs", "hrrn", "lpm", "gate")  # the last is fcfs with strangers held back


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    prefill: float = 0.022  # a pass
    prefill_token: float = 1 / 80_000
    decode: float = 0.0024  # a step
    decode_request: float = 40e-6
    client: float = 0.030  # from an answer's end to the arrival of the next turn
    client_token: float = 2e-6  # of its prompt


@dataclass(slots=True)
class Client:
    """The rest of a session, and what was said in it so far."""

    turns: deque[Turn] = field(default_factory=deque)
    history: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class Seen:
    """One turn as its client sees it; `number` is its place in the order of arrival."""

    client: Client
    number: int
    sent: float
    resumed: int = -1  # tokens; negative: not admitted yet
    ttft: float = 0.0
    overtaken: int = 0


class Crowd(World):
    """A scheduler, its clients and a clock.

    `tokens` and `states` are SGLang's `--max-total-tokens` and `--max-mamba-cache-size`, together
    the bytes of one arena; `longest` bounds a conversation.  `policy` is SGLang's.
    """

    pass_tokens = 16_384

    def __init__(
        self,
        sessions: Sequence[list[Turn]],
        clients: int,
        *,
        policy: str = "fcfs",
        overtake: int = 0,
        tokens: int = 200_000,
        states: int = 100,
        longest: int = 65_536,
    ) -> None:
        super().__init__(
            tokens=tokens,
            states=states,
            rows=256,
            chunk=8192,
            kernel_chunk=64,
            overlap=True,
            device="meta",
            token_bytes=TOKEN_BYTES,
            state_words=(STATE_BYTES - CONVOLUTION_BYTES) // 4,
            context=longest + 64,
            **asdict(Options(overtake=overtake)),
        )
        self.scheduler.policy = SchedulePolicy(policy, self.tree, False, False, False)
        self.costs = Costs()
        self.now = 0.0
        self.seen: dict[Req, Seen] = {}
        self.peak = 0  # requests that run
        self._todo = deque(sessions)
        self._arrivals: list[tuple[float, int, Client, float]] = []
        self._sent = itertools.count()
        self._fresh = itertools.count(load.VOCABULARY)  # tokens that no prompt of a trace has
        self._cost = 0.0  # of the pass just launched
        self._computed = 0  # prompt tokens: SGLang's `processed_tokens_counter`
        self._full = False  # SGLang's `batch_is_full`: nobody is admitted before somebody leaves
        for _ in range(clients):
            self._send(Client())

    # -- clients --

    def _send(self, client: Client) -> None:
        """The next turn, of a new session after the last one; nothing if none is left."""
        if not client.turns:
            if not self._todo:
                return
            client.turns, client.history = deque(self._todo.popleft()), array("q")
        client.history = client.history + array("q", client.turns[0].new_tokens)
        arrival = self.now + self.costs.client + self.costs.client_token * len(client.history)
        heapq.heappush(self._arrivals, (arrival, next(self._sent), client, self.now))

    def _receive(self) -> None:
        """Queue the turns that have arrived."""
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, client, sent = heapq.heappop(self._arrivals)
            req = self.request(client.history, client.turns.popleft().output_length)
            req.sampling_params.ignore_eos = True
            req.arrival_processed_tokens = self._computed
            self.seen[req] = Seen(client, len(self.seen), sent)

    # -- the scheduler --

    def play(self) -> Crowd:
        """Until every session is over."""
        while self._arrivals or self.waiting or self.running or self.chunked or self._inflight:
            self._receive()
            self._cost = 0.0
            self.step()
            self.now += self._cost
            idle = not self._cost and not self._inflight and not self.running
            if idle and self._arrivals:
                self.now = max(self.now, self._arrivals[0][0])
            assert self._arrivals or not (idle and self.waiting), "nobody can be admitted"
        wanted = [req.sampling_params.max_new_tokens for req in self.seen]
        assert [len(req.output_ids) for req in self.seen] == wanted, "a request was aborted"
        return self

    def _admit(self) -> list[Req]:
        if self._full and self.running and self.chunked is None:
            return []
        batch = super()._admit()
        first = [self.seen[req].number for req in batch if self.seen[req].resumed < 0]
        for req in self.waiting if first else ():
            seen = self.seen[req]
            seen.overtaken += sum(number > seen.number for number in first)
        return batch

    def _new_prefill(self, state: SimpleNamespace, running: SimpleNamespace) -> list[Req]:
        queue = state.waiting_queue
        self.scheduler.policy.calc_priority(queue, running, processed_tokens=self._computed)
        batch = super()._new_prefill(state, running)
        self._full = running.batch_is_full and bool(batch or self.running)
        return batch

    def _prefill(self, reqs: list[Req]) -> tuple[list[tuple[Req, int]], bool]:
        for req in reqs:
            seen = self.seen[req]
            seen.resumed = req.prefix_len if seen.resumed < 0 else seen.resumed
        tokens = sum(req.extend_end - req.prefix_len for req in reqs)
        self._computed += tokens
        self._cost = self.costs.prefill + self.costs.prefill_token * tokens
        launched = super()._prefill(reqs)
        self.peak = max(self.peak, len(self.running) + (self.chunked is not None))
        return launched

    def _extend_rows(self, reqs: list[Req]) -> int:
        """Decode as many steps at once as nothing can happen in."""
        cost = self.costs.decode + self.costs.decode_request * len(reqs)
        steps = self._uneventful(reqs, cost)
        if not self.allocator.check_decode_capacity(
            num_tokens=steps * len(reqs), tree_cache=self.tree
        ):
            steps = 1  # for which there is room
        alloc_token_slots(self.tree, steps * len(reqs))
        for req in reqs:
            req.kv.kv_allocated_len += steps
            req.kv.kv_committed_len += steps
        self.rows.alloc_aux_to_lengths(
            req_pool_indices_cpu=torch.tensor([req.kv.req_pool_idx for req in reqs]),
            target_seq_lens_cpu=torch.tensor([req.kv.kv_committed_len for req in reqs]),
        )
        self._cost = cost * steps
        return steps

    def _uneventful(self, reqs: list[Req], cost: float) -> int:
        """Steps until an answer ends or a turn arrives; one where somebody may be admitted."""
        held = set(map(id, self.tree.gate.held))
        if not self._full and any(id(req) not in held for req in self.waiting):
            return 1
        # Of the tokens after the prompt, the last sampled one is not in a row yet.
        steps = min(_last(req) - 1 - req.kv.kv_committed_len for req in reqs)
        if self._arrivals:
            steps = min(steps, math.ceil((self._arrivals[0][0] - self.now) / cost))
        return max(1, steps)

    def _process(self, results: list[tuple[Req, int]], is_prefill: bool) -> None:
        ran = list(self.running)
        super()._process(results, is_prefill)
        for req, _ in results if is_prefill else ():
            seen = self.seen[req]
            seen.ttft = seen.ttft or self.now - seen.sent
        for req in ran:
            if req.finished():
                self._full = False
                client = self.seen[req].client
                client.history = client.history + array("q", req.output_ids)
                self._send(client)

    # -- what a model would compute --

    def _run_pass(self, _worker: None, _batch: SimpleNamespace) -> None:
        writing = state_pass.current()
        if writing is not None:
            writing.convolved = writing.walked = True

    def _forward(self, req: Req, start: int, end: int) -> None:
        pass

    def _sample(self, _req: Req) -> int:
        return next(self._fresh)

    def check(self) -> None:
        """Takes longer than the steps themselves; tests/plugin counts these books again."""


def _last(req: Req) -> int:
    """Tokens of the prompt and its whole answer."""
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens)


def figures(crowd: Crowd) -> dict[str, Any]:
    """What its clients saw; times in seconds of the model."""
    seen = list(crowd.seen.values())
    prompts = sum(len(req.origin_input_ids) for req in crowd.seen)
    ttfts = [one.ttft for one in seen]
    return {
        "requests": len(seen),
        "seconds": crowd.now,
        "token_hit_rate": sum(one.resumed for one in seen) / prompts,
        "output_tokens_per_s": sum(len(req.output_ids) for req in crowd.seen) / crowd.now,
        "ttft_s": {
            "p50": load.percentile(ttfts, 0.5),
            "p95": load.percentile(ttfts, 0.95),
            "max": max(ttfts),
        },
        "running_peak": crowd.peak,
        "held_requests": crowd.tree.gate.turnstile.held_requests,
        "most_overtaken": max(one.overtaken for one in seen),
        "retracted_requests": crowd.tree.observer.retracted,
    }


def measure(parsed: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every number of clients under every policy."""
    sessions = load.sessions(parsed.trace, count=parsed.sessions, longest=parsed.longest)
    for clients, policy in itertools.product(parsed.clients, parsed.policies):
        with pytest.MonkeyPatch.context() as patch, fake_device(patch):
            crowd = Crowd(
                sessions,
                clients,
                policy="fcfs" if policy == "gate" else policy,
                overtake=0 if policy == "fcfs" else parsed.overtake,
                tokens=parsed.tokens,
                states=parsed.states,
                longest=parsed.longest,
            )
            yield {"clients": clients, "policy": policy, **figures(crowd.play())}


def line(cell: dict[str, Any]) -> str:
    """One cell for people."""
    ttft = cell["ttft_s"]
    return (
        f"{cell['clients']:4d} clients  {cell['policy']:5s} {cell['requests']:5d} requests  "
        f"hit {100 * cell['token_hit_rate']:5.1f} %  {cell['output_tokens_per_s']:6.0f} tok/s  "
        f"TTFT {ttft['p50']:7.3f} / {ttft['p95']:7.3f} / {ttft['max']:7.2f} s  "
        f"running {cell['running_peak']:3d}  held {cell['held_requests']:5d}  "
        f"overtaken {cell['most_overtaken']:4d}  retracted {cell['retracted_requests']}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", required=True)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--sessions", type=int, default=78)
    parser.add_argument("--longest", type=int, default=65_536, help="tokens of one conversation")
    parser.add_argument("--tokens", type=int, default=200_000, help="of KV in the arena, beside")
    parser.add_argument("--states", type=int, default=100, help="these")
    parser.add_argument("--overtake", type=int, default=Options().overtake, help="of the gate")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    if not parsed.trace.exists():
        parser.error(f"--trace {parsed.trace}: no such file")
    if min(parsed.clients) < 1:
        parser.error(f"--clients {min(parsed.clients)}: at least 1")
    if parsed.tokens <= parsed.longest:
        parser.error(f"--tokens {parsed.tokens} hold no conversation of --longest {parsed.longest}")
    report: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "command": " ".join(["python", "-m", "tests.bench.crowd", *sys.argv[1:]]),
        "costs": asdict(Costs()),
        "cells": [],
    }
    for cell in measure(parsed):
        print(line(cell), flush=True)
        report["cells"].append(cell)
        if parsed.json:
            parsed.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
