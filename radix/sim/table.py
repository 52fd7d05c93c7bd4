"""`python -m radix.sim.table DIR`: the three traces under every policy, as one Markdown table.

Cells that a `--json` file already holds are not run again, so that a long table can be made in
parts: `--policy`, `--trace`. Delete the file after a change of any policy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radix.sim import cells, model, report
from radix.sim.policies import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GB = 1_000_000_000
ONLINE = ("sglang", "sglang-cap3", "marconi", "vllm", "lru")  # peers that do not know the future
START, END = "<!-- table: python -m radix.sim.table -->", "<!-- end of table -->"


@dataclass(frozen=True, slots=True)
class Load:
    """A trace, the capacities it is replayed at, and whether coarsely (`cells.Plan`)."""

    name: str
    file: str
    capacities_gb: tuple[int, ...]
    coarse: bool = False


LOADS = (
    Load("agentic", "agentic-coding.jsonl.gz", (8, 16, 32, 64, 128), coarse=True),
    Load("conversation", "mooncake-conversation.jsonl.gz", (16, 32, 64, 128, 256)),
    Load("airline", "airline-chat.jsonl.gz", (1, 2, 4, 8)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        results = _results(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    text = "\n".join(markdown(results))
    print(text)  # noqa: T201
    if options.write is not None:
        page = options.write.read_text("utf-8")
        before, rest = page.split(START)
        options.write.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}", "utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m radix.sim.table", description=__doc__)
    flags.add_argument("traces", type=Path, metavar="DIR", help="where the three traces are")
    flags.add_argument("--policy", default="all", metavar="NAME,...|all")
    flags.add_argument("--trace", default="all", metavar="NAME,...|all")
    flags.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time")
    flags.add_argument("--json", type=Path, metavar="F", help="read known cells, write all")
    flags.add_argument("--write", type=Path, metavar="F.md", help=f"replace what is after {START}")
    flags.add_argument("--plots", type=Path, metavar="DIR", help="one plot per trace")
    return flags


def _results(options: argparse.Namespace) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        known = json.loads(options.json.read_text("utf-8"))
    known |= {"machine": machine(), "commit": commit()}
    policies = tuple(TABLE) if options.policy == "all" else tuple(options.policy.split(","))
    for load in _loads(options.trace):
        for policy in policies:
            found = known.setdefault(load.name, {}).setdefault("cells", [])
            _complete(found, load, policy, options)
            if options.json is not None:
                options.json.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    if options.plots is not None:
        for load in LOADS:
            if load.name in known:
                named = {"trace": load.file, "geometry": {"name": "k3-tp8"}}
                drawn = named | {"cells": _in_order(known[load.name]["cells"])}
                report.plot(drawn, options.plots / f"sim-{load.name}.png")
    return known


def _loads(text: str) -> list[Load]:
    by_name = {load.name: load for load in LOADS}
    names = list(by_name) if text == "all" else text.split(",")
    for name in names:
        if name not in by_name:
            raise ValueError(f"--trace {name} is unknown; traces: {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _complete(
    found: list[dict[str, Any]], load: Load, policy: str, options: argparse.Namespace
) -> None:
    """Run the cells of one policy that are not found yet."""
    done = {cell["capacity_bytes"] for cell in found if cell["policy"] == policy}
    missing = tuple(gb * GB for gb in load.capacities_gb if gb * GB not in done)
    if missing and not (done and policy in cells.UNLIMITED):
        path = options.traces / load.file
        k3 = model.load("k3-tp8")
        plan = cells.Plan(path, k3, missing, (policy,), coarse=load.coarse)
        found += cells.run(plan, jobs=options.jobs, progress=report.progress)["cells"]


def _in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    order = list(TABLE)
    return sorted(found, key=lambda cell: (order.index(cell["policy"]), cell["capacity_bytes"]))


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """Token hit rates, and how much of the gap to the clairvoyant is closed."""
    policies = [name for name in TABLE if any(_rates(results, load, name) for load in LOADS)]
    yield f"{results['machine']}, commit {results['commit']}; token hit rate, %."
    yield ""
    yield f"| trace | GB | {' | '.join(policies)} | ours - best peer | gap closed |"
    yield "|---" * (len(policies) + 4) + "|"
    closed = []
    for load in LOADS:
        rates = {name: _rates(results, load, name) for name in policies}
        for gb in load.capacities_gb:
            here = {name: found.get(gb, found.get(0)) for name, found in rates.items()}
            lead, share = _standing(here)
            closed += [] if share is None else [share]
            shown = " | ".join("" if v is None else f"{v:.1f}" for v in here.values())
            yield (
                f"| {load.name} | {gb} | {shown} | {'' if lead is None else f'{lead:+.1f}'} | "
                f"{'' if share is None else f'{share:.0f} %'} |"
            )
    if closed:
        yield ""
        yield (
            f"Gap between the best online peer and the clairvoyant, over the {len(closed)} cells "
            f"where it exceeds 1 point: {sum(closed) / len(closed):.0f} % closed on average."
        )


def _rates(results: dict[str, Any], load: Load, policy: str) -> dict[int, float]:
    """Hit rate in percent by capacity in GB; under 0 if no capacity matters."""
    found = results.get(load.name, {}).get("cells", [])
    return {
        0 if policy in cells.UNLIMITED else cell["capacity_bytes"] // GB:
        100 * cell["token_hit_rate"]
        for cell in found if cell["policy"] == policy
    }  # fmt: skip


def _standing(here: dict[str, float | None]) -> tuple[float | None, float | None]:
    """Points ahead of the best online peer; percent of its gap that are closed, at most 100."""
    peers = [rate for name in ONLINE if (rate := here.get(name)) is not None]
    ours, ideal = here.get("ours"), here.get("clairvoyant")
    if not peers or ours is None:
        return None, None
    lead = ours - max(peers)
    if ideal is None or ideal - max(peers) <= 1:
        return lead, None
    return lead, min(100.0, 100 * lead / (ideal - max(peers)))


def machine() -> str:
    """What the table was made on, without names."""
    return f"{os.cpu_count()}-core {platform.machine()} CPU, Python {platform.python_version()}"


def commit() -> str:
    """The checkout's commit, or "unknown"."""
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
