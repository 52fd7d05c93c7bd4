"""The hit rate to expect: the planned arena in the simulator, under the planned traffic."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool import Geometry
    from radix.sim.model import Model
    from radix.sim.trace import Trace
    from sgl_kimi_k3.config import Options
    from sgl_kimi_k3.plan.capacity import Fits, Server
    from sgl_kimi_k3.plan.traffic import Profile, Traffic

SIMULATED_TOKENS = 60_000_000  # prompt tokens of one replay: some seconds


@dataclass(frozen=True, slots=True)
class Expected:
    """One replay.

    Attributes:
        conversations: in use at once on one attention replica; None for a trace.
        interval: tokens; 0 is off.
        hit_rate: resumed share of all prompt tokens.
        ceiling: that of an endless memory with a state after every token.
        requests: how many the replay had.
        refused: of those, how many do not fit even alone.
    """

    conversations: int | None
    interval: int
    hit_rate: float
    ceiling: float
    requests: int
    refused: int


def expect(
    server: Server, geometry: Geometry, traffic: Traffic, fits: Fits, options: Options
) -> tuple[Expected, ...]:
    """Replay the traffic: a profile at three loads, or the one asked for.

    A trace is replayed with and without the interval; in a profile no conversation branches, so
    there the grid has nothing to win.
    """
    model = _model(server)
    grid = _grid(options.grid, geometry.block_size)
    options = replace(options, grid=grid, opportunistic=_grid(options.opportunistic, grid))
    if traffic.trace is not None:
        trace = _read(traffic.trace)
        intervals = dict.fromkeys((options.interval, 0))
        return tuple(
            _replay(trace, model, geometry, replace(options, interval=one), None)
            for one in intervals
        )
    found = []
    for count in _loads(traffic, fits, server.layout.dp):
        trace = _synthetic(traffic.profile, count)
        found.append(_replay(trace, model, geometry, options, count))
    return tuple(found)


def _loads(traffic: Traffic, fits: Fits, replicas: int) -> list[int]:
    profile = traffic.profile
    tokens = 2 * sum(profile.prompt_len(turn) for turn in range(profile.turns))
    most = max(SIMULATED_TOKENS // tokens, 1)
    if traffic.conversations is not None:
        return [min(-(-traffic.conversations // replicas), most)]
    fit = max(fits.conversations // replicas, 1)
    return sorted({max(min(count, most), 1) for count in (fit // 2, fit, 2 * fit)})


def _grid(tokens: int, unit: int) -> int:
    """Rounded up to a multiple of `unit`."""
    return -(-tokens // unit) * unit


def _model(server: Server) -> Model:
    from radix.sim.model import of_config  # noqa: PLC0415  # only where a replay is wanted

    state_bytes, token_bytes = server.unit_bytes()
    model = of_config(server.model.name, dict(server.model.text), server.layout.attention_tp)
    return replace(model, state_bytes=state_bytes, token_bytes=-(-token_bytes // server.layout.dcp))


def _read(path: Path) -> Trace:
    from radix.sim.trace import read  # noqa: PLC0415

    return read(path)


def _synthetic(profile: Profile, conversations: int) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.jsonl"
        file.write_text("\n".join(profile.lines(conversations)), "utf-8")
        return _read(file)


def _replay(
    trace: Trace, model: Model, geometry: Geometry, options: Options, conversations: int | None
) -> Expected:
    from radix.sim import policies  # noqa: PLC0415
    from radix.sim.engine import Engine  # noqa: PLC0415
    from radix.sim.server import Setup  # noqa: PLC0415

    setup = Setup(
        model=model,
        capacity_bytes=geometry.total_bytes,
        trace=trace,
        block_size=geometry.block_size,
        interval=options.interval,
        grid=options.grid,
        opportunistic=options.opportunistic,
        ghost_tokens=options.ghost_tokens,
    )
    totals = Engine(trace, policies.make("ours", setup), model).run()
    best = Engine(trace, policies.make("unbounded", setup), model).run()
    return Expected(
        conversations=conversations,
        interval=options.interval,
        hit_rate=totals.token_hit_rate,
        ceiling=best.token_hit_rate,
        requests=totals.requests,
        refused=totals.refused,
    )
