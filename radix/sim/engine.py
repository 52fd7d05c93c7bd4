"""Replay: when requests run, and what their answers from a policy add up to.

Arrivals are the trace's; a request of a session waits for the one before it. A running request
prefills what it could not resume at one rate and then decodes at another, beside all others: rates
say how long memory is held, not how much a GPU can do. Requests that find no room queue, first come
first served. Time is whole microseconds; events at one instant keep the order of their making.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radix.sim.server import CHUNK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from radix.sim.model import Model
    from radix.sim.server import Server
    from radix.sim.trace import Request, Trace

_SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one request is served, in tokens per second."""

    prefill: int = 60_000
    decode: int = 200

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise ValueError(f"rates must be at least 1 token per second: {self}")


@dataclass(slots=True)
class Totals:
    """What a replay adds up to. Tokens unless named otherwise."""

    requests: int = 0
    input_tokens: int = 0
    resumed_tokens: int = 0
    input_flops: float = 0.0
    saved_flops: float = 0.0
    refused: int = 0  # requests that do not fit even alone
    cut_short: int = 0  # requests that ran out of memory
    queued: int = 0  # requests that had to wait for memory
    peak_running: int = 0  # requests

    @property
    def token_hit_rate(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.resumed_tokens / self.input_tokens

    @property
    def saved_flops_share(self) -> float:
        """Share of the prefills' FLOPs that were not spent."""
        return self.saved_flops / self.input_flops


@dataclass(slots=True)
class Engine:
    """One replay. `on_request` is called as each request ends, with its resumed tokens."""

    trace: Trace
    server: Server
    model: Model
    rates: Rates = field(default_factory=Rates)
    on_request: Callable[[Request, int], None] | None = None
    totals: Totals = field(default_factory=Totals)
    _events: list[tuple[int, int, Request, int]] = field(default_factory=list)
    _serial: int = 0
    _now: int = 0
    _waiting: deque[Request] = field(default_factory=deque)
    _behind: dict[object, deque[Request]] = field(default_factory=dict)  # by session in service
    _running: dict[Request, int] = field(default_factory=dict)  # resumed tokens
    _blocked: bool = False  # the first in the queue was refused, and nothing has ended since

    def run(self) -> Totals:
        """Serve the whole trace."""
        arrivals = deque(self.trace.requests)
        while arrivals or self._events:
            if arrivals and (not self._events or arrivals[0].arrival_us <= self._events[0][0]):
                self._now = max(self._now, arrivals[0].arrival_us)
                self._arrive(arrivals.popleft())
            else:
                self._now, _, request, up_to = heapq.heappop(self._events)
                self._step(request, up_to)
        assert not self._waiting, f"{len(self._waiting)} requests never ran"
        assert not self._running, f"{len(self._running)} requests never ended"
        return self.totals

    def _arrive(self, request: Request) -> None:
        behind = self._behind.get(request.session)
        if behind is not None:
            behind.append(request)
            return
        if request.session is not None:
            self._behind[request.session] = deque()
        self._queue(request)

    def _queue(self, request: Request) -> None:
        self._waiting.append(request)
        self._admit()
        self.totals.queued += bool(self._waiting) and self._waiting[-1] is request

    def _admit(self) -> None:
        while self._waiting and not self._blocked:
            request = self._waiting[0]
            resumed = self.server.begin(request)
            if resumed is None and self._running:
                self._blocked = True
                return
            self._waiting.popleft()
            if resumed is None:
                self.totals.refused += 1
                self._end(request, 0)
                continue
            assert 0 <= resumed < request.prompt_len, (request.number, resumed)
            self._running[request] = resumed
            self.totals.peak_running = max(self.totals.peak_running, len(self._running))
            self._schedule_chunk(request, resumed)

    def _schedule_chunk(self, request: Request, start: int) -> None:
        up_to = min(start + CHUNK_TOKENS, request.prompt_len)
        self._schedule((up_to - start) * _SECOND // self.rates.prefill, request, up_to)

    def _schedule(self, delay_us: int, request: Request, up_to: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self._now + delay_us, self._serial, request, up_to))

    def _step(self, request: Request, up_to: int) -> None:
        fits = self.server.extend(request, up_to)
        self.totals.cut_short += not fits
        if fits and up_to < request.prompt_len:
            self._schedule_chunk(request, up_to)
        elif fits and up_to < request.computed_len:
            delay = request.output_len * _SECOND // self.rates.decode
            self._schedule(delay, request, request.computed_len)
        else:
            self.server.finish(request)
            self._blocked = False
            self._end(request, self._running.pop(request))
            self._admit()

    def _end(self, request: Request, resumed: int) -> None:
        totals = self.totals
        totals.requests += 1
        totals.input_tokens += request.prompt_len
        totals.resumed_tokens += resumed
        totals.input_flops += self.model.flops(0, request.prompt_len)
        totals.saved_flops += self.model.flops(0, resumed)
        if self.on_request is not None:
            self.on_request(request, resumed)
        behind = self._behind.get(request.session)
        if behind:
            self._waiting.append(behind.popleft())
        elif behind is not None:
            del self._behind[request.session]
