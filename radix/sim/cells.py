"""Cells: one policy at one capacity over one trace, alone or in parallel processes."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from radix.sim import policies, trace
from radix.sim.engine import Engine, Rates
from radix.sim.server import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from radix.sim.model import Model
    from radix.sim.trace import Trace

    # Told the label of a cell and how many input tokens of it are done.
    Advance = Callable[[str, int], None]
    Progress = Callable[[int], AbstractContextManager[Advance]]

_EVERY = 16  # requests between two reports of progress
UNLIMITED = ("null", "unbounded")  # policies that no capacity changes
INTERVAL_OF = ("ours",)  # policies with an interval
ALWAYS_EXACT = ("sglang", "sglang-cap3", "vllm")  # policies that count in pages of their own

_loaded: dict[Path, Trace] = {}  # of this process


@dataclass(frozen=True, slots=True)
class Plan:
    """Which cells to run.

    With `coarse` a block of the trace counts as one token for every policy: as many times faster,
    and right to a block's length. `sglang` and `vllm`, whose units are their own, run exactly.
    """

    trace: Path
    model: Model
    capacities: tuple[int, ...]
    policies: tuple[str, ...]
    intervals: tuple[int, ...] = (32_768,)
    opportunistic: int = 4096
    dense: int = 0
    probation: int = 16
    block_size: int = 1
    rates: Rates = field(default_factory=Rates)
    coarse: bool = False

    def cells(self) -> Iterator[Cell]:
        """Every cell, capacities outermost. What does not depend on something runs once."""
        for capacity, policy, interval in product(self.capacities, self.policies, self.intervals):
            if policy in UNLIMITED and capacity != self.capacities[0]:
                continue
            if policy not in INTERVAL_OF and interval != self.intervals[0]:
                continue
            yield Cell(self, policy, capacity, interval)


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay."""

    plan: Plan
    policy: str
    capacity_bytes: int
    interval: int

    def setup(self, requests: Trace) -> Setup:
        """What the policy is built for."""
        plan, unit = self.plan, self.unit(requests)
        exact = Setup(
            model=plan.model,
            capacity_bytes=self.capacity_bytes,
            trace=requests,
            block_size=plan.block_size,
            interval=self.interval,
            opportunistic=plan.opportunistic,
            dense=plan.dense,
            probation=plan.probation,
        )
        if unit == 1:
            return exact
        return replace(
            exact,
            model=plan.model.coarse(unit),
            trace=requests.coarse(),
            block_size=1,
            interval=self.interval // unit,
            grid=max(1, exact.grid // unit),
            opportunistic=plan.opportunistic // unit,
            dense=plan.dense and max(1, plan.dense // unit),
            ghost_tokens=exact.ghost_tokens // unit,
        )

    def unit(self, requests: Trace) -> int:
        """Tokens that count as one."""
        return requests.block_size if self.plan.coarse and self.policy not in ALWAYS_EXACT else 1

    def rates(self, unit: int) -> Rates:
        """In units."""
        rates = self.plan.rates
        return Rates(max(1, rates.prefill // unit), max(1, rates.decode // unit))


def load(path: Path) -> Trace:
    """The trace, read once per process."""
    if path not in _loaded:
        _loaded[path] = trace.read(path)
    return _loaded[path]


def replay(cell: Cell, advance: Advance | None = None) -> dict[str, Any]:
    """One cell of the result.

    Raises:
        ValueError: the policy cannot be built at that capacity.
    """
    requests = load(cell.plan.trace)
    setup, unit = cell.setup(requests), cell.unit(requests)
    server = policies.make(cell.policy, setup)
    done = 0

    def on_request(_: object, __: int) -> None:
        nonlocal done
        done += 1
        if advance is not None and done % _EVERY == 0:
            advance(f"{cell.policy} {cell.capacity_bytes / 1e9:g} GB", _EVERY)

    start = time.perf_counter()
    totals = Engine(setup.trace, server, setup.model, cell.rates(unit), on_request).run()
    wall_s = time.perf_counter() - start
    if advance is not None:
        advance(f"{cell.policy} {cell.capacity_bytes / 1e9:g} GB", done % _EVERY)
    extra = {name: asdict(totals)[name] for name in ("refused", "cut_short", "queued")}
    return {
        "policy": cell.policy,
        "capacity_bytes": cell.capacity_bytes,
        "interval": cell.interval,
        "input_tokens": totals.input_tokens * unit,
        "resumed_tokens": totals.resumed_tokens * unit,
        "token_hit_rate": totals.token_hit_rate,
        "requests": totals.requests,
        "saved_flops_share": totals.saved_flops_share,
        "wall_s": round(wall_s, 2),
        "counters": extra | {"peak_running": totals.peak_running} | dict(server.counters()),
    }


def run(plan: Plan, *, jobs: int, progress: Progress) -> dict[str, Any]:
    """All cells of a plan, in the plan's order whatever finishes first.

    Raises:
        ValueError: the trace cannot be read, a policy is unknown, or a capacity too small.
    """
    policies.check(plan.policies)
    for capacity in plan.capacities:
        plan.model.geometry(capacity, plan.block_size).require(
            states=1, blocks=1, flag="--capacity"
        )
    every = list(plan.cells())
    requests = load(plan.trace)
    found: dict[Cell, dict[str, Any]] = {}
    with progress(len(every) * len(requests.requests)) as advance:
        if jobs == 1 or len(every) == 1:
            for cell in every:
                found[cell] = replay(cell, advance)
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
                futures = {workers.submit(replay, cell): cell for cell in every}
                for future in as_completed(futures):
                    cell = futures[future]
                    found[cell] = future.result()
                    label = f"{cell.policy} {cell.capacity_bytes / 1e9:g} GB"
                    advance(label, len(requests.requests))
    return {
        "trace": requests.name,
        "geometry": {"name": plan.model.name, "state_bytes": plan.model.state_bytes,
                     "token_bytes": plan.model.token_bytes},
        "rates": asdict(plan.rates),
        "cells": [found[cell] for cell in every],
    }  # fmt: skip
