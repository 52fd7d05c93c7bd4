"""Stock SGLang and this backend, served, on one GPU: `python -m tests.bench.serve --json F`.

For each model (a config of random weights) stock in its strongest configurations and ours are
started with the same memory and measured one after the other, with the same requests; loads of few
clients, those with room and equal batches `--rounds` times, every other time in the opposite order,
and then ours is also compared with each other one round by round.  These models are small and their
steps are bound by the host: with `--cores N` each server has N cores of its own, and the one that
is measured is moved to the first ones.  Without that two starts of one server differ by more than
the two servers do.

- `agree`: whether answers from the cache are those without, and those of the group's first server;
- `shared_prefix`, with room on an empty cache, under pressure after all loads with what they left;
  the exit status is 1 if ours answered otherwise than without a cache anywhere;
- `decode`: as many answers at once and nothing else, for the latency of equal batches; `full`: the
  same in the arena as the loads under pressure left it, where every step takes what is evicted;
- chat loads made from traces, closed loop, at several numbers of clients, in an arena small enough
  that the cache is under pressure, and (`roomy`) without pressure;
- `paced`: the same chat, where every client sends a turn every two seconds, so that two servers
  that keep up do the same work in the same time;
- `short`: many clients with short contexts, for how many run at once.

Figures are written after every cell, so that a run that is cut off leaves what it measured.  Run it
from the repository's root with SGLang importable:

    python -m tests.bench.serve --config tests/bench/configs/k3_8l.json --traces DIR --json F
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import agree, loads, rounds, shared_prefix
from tests.bench.servers import (
    OURS,
    PREFILL_GRAPHS,
    STOCK,
    STOCK_SPLIT,
    Server,
    start_all,
    take_stage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# One arena for all: KV tokens and states whose bytes it is the sum of.
PRESSED = "--max-total-tokens 200000 --max-mamba-cache-size 100 --max-running-requests 256"
ROOMY = "--max-total-tokens 1500000 --max-mamba-cache-size 2000 --max-running-requests 256"
FRACTION = "--mem-fraction-static 0.9"
FEW = 8  # clients: little is measured in a round


def machine(commit: str) -> dict[str, str]:
    """What the figures were measured on."""
    import sglang  # seconds to import
    import torch

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": sglang.__version__,
        "commit": commit,
        "command": " ".join(["python", "-m", "tests.bench.serve", *sys.argv[1:]]),
    }


def git_commit() -> str:
    """The checkout's commit."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def variants(config: Path) -> dict[str, str]:
    """Stock's strongest for this architecture, also with what it leaves off by default, and ours.

    Stock's lists leave the text-only K3 class out: it refuses `extra_buffer` for it.
    """
    text_only = "KimiK3LinearForCausalLM" in json.loads(config.read_text())["architectures"]
    if text_only:
        return {"stock": "--enable-unified-memory", "ours": OURS}
    return {
        "stock": STOCK,
        "stock split": STOCK_SPLIT,
        "stock graphs": f"{STOCK_SPLIT} {PREFILL_GRAPHS}",
        "ours": OURS,
    }


@dataclass(frozen=True)
class Group:
    """Servers of one model with the same memory."""

    roomy: bool
    servers: list[Server]


def groups(parsed: argparse.Namespace) -> list[Group]:
    """All servers, not started."""
    made = []
    wanted = parsed.variants and parsed.variants.split(",")
    numbers = itertools.count()
    for config in parsed.config:
        for memory, sizes in (("roomy", ROOMY), ("pressed", PRESSED)):
            if memory not in parsed.parts.split(","):
                continue
            servers = []
            for name, flags in variants(config).items():
                if wanted and name not in wanted:
                    continue
                at = next(numbers)
                label = f"{config.stem} {memory} {name}".replace(" ", "-")
                line = f"{FRACTION} {sizes} {flags} {parsed.flags}"
                cores = tuple(range(at * parsed.cores, (at + 1) * parsed.cores))
                port = parsed.port + at
                servers.append(
                    Server(label, config, line, port, parsed.gpu, cores=cores, ours=name == "ours")
                )
            made.append(Group(memory == "roomy", servers))
    return made


def pairs(made: list[Group]) -> list[tuple[str, str]]:
    """Ours and each other server of its group."""
    return [
        (ours.name, other.name)
        for group in made
        for ours in group.servers
        for other in group.servers
        if ours.ours and not other.ours
    ]


def keep_clients_off(servers: list[Server]) -> None:
    """Run this process on the cores that no server has."""
    taken = {core for server in servers for core in server.cores}
    left = os.sched_getaffinity(0) - taken
    if not left or not taken <= os.sched_getaffinity(0):
        raise SystemExit(
            f"--cores {len(servers[0].cores)} for each of {len(servers)} servers leaves none of "
            f"{os.cpu_count()} to the clients: lower it or choose --variants"
        )
    if taken:
        os.sched_setaffinity(0, left)


def cell(server: Server, one: loads.Load, turn: int, parsed: argparse.Namespace) -> dict:
    """One load on one server, in one round."""
    named = {"round": turn, "server": server.name, "load": one.name, "clients": one.clients}
    if not (server.flush() if one.fresh else server.alive()):
        return {**named, "dead": True}
    since = len(server.text())
    figures = one.play(server.url, parsed.traces, parsed.seconds, turn)
    return {**named, **figures, **server.figures(since), "dead": not server.alive()}


def agreed(figures: dict[str, Any] | None) -> bool:
    """Whether every prompt was answered alike however it was computed."""
    return bool(figures and "agree" in figures) and (
        min(figures["agree"].values()) == figures["prompts"]
    )


def sampled_alike(shared: dict[str, Any], figures: dict[str, Any]) -> bool:
    """Whether `shared_prefix` sampled the same, or parted where two tokens were as good as tied."""
    if "outputs_apart" not in shared:
        return False
    another_prefix = figures["apart"]["another prefix"]["median"]
    return shared["outputs_apart"] < agree.most_rounded(another_prefix)


def right(name: str, report: dict[str, Any]) -> bool:
    """Whether all that was asked of a server was answered as without a cache."""
    figures, shared = report["agree"].get(name), report["shared_prefix"].get(name)
    return agreed(figures) and (shared is None or sampled_alike(shared, figures))


def note_shared_prefix(server: Server, report: dict[str, Any], *, flush: bool) -> None:
    """Note and print what it resumes of a shared prefix; flushed: as if freshly started."""

    def found() -> dict[str, Any]:
        if flush:
            assert server.flush(), "the server is gone, or busy although nothing was asked"
        return shared_prefix.run(server.url)

    report["shared_prefix"][server.name] = agree.told(found)
    print(server.name, json.dumps(report["shared_prefix"][server.name]), flush=True)


def check(server: Server, group: Group, report: dict[str, Any]) -> None:
    """Note and print what it answers, and with room what it resumes of a shared prefix."""
    pair = agree.Server(server.url), agree.Server(group.servers[0].url)
    found = report["agree"][server.name] = agree.told(lambda: agree.compare(*pair))
    print(server.name, json.dumps(found), flush=True)
    if group.roomy:
        note_shared_prefix(server, report, flush=True)


def measure(
    group: Group, chosen: tuple[loads.Load, ...], up: list[Server], parsed: argparse.Namespace
) -> Iterator[dict]:
    """Every load on every server of the group, in rounds; `up` are all that run."""
    for one in chosen:
        repeated = group.roomy or one.clients <= FEW or not one.trace
        for turn in range(parsed.rounds if repeated else 1):
            order = group.servers if turn % 2 == 0 else group.servers[::-1]
            for server in order:
                take_stage(server, up)
                yield cell(server, one, turn, parsed)


def line(cell: dict) -> str:
    """One cell for people."""
    if "ttft_ms" not in cell:
        return json.dumps(cell)
    return (
        f"{cell['server']:36s} {cell['load']:8s} {cell['clients']:4d} clients "
        f"{cell['requests']:5d} requests {len(cell['failures']):2d} failed  "
        f"hit {100 * cell['token_hit_rate']:5.1f} %  "
        f"TTFT {cell['ttft_ms']['p50']:7.1f} / {cell['ttft_ms']['p95']:7.1f} ms  "
        f"ITL {cell['itl_ms']['p50']:6.2f} / {cell['itl_ms']['p95']:6.2f} ms  "
        f"TPOT {cell['tpot_ms']['p50']:6.2f} ms  "
        f"{cell['output_tokens_per_s']:6.0f} tok/s  running {cell['running_peak']:3d}  "
        f"retracted {cell['retractions']}  late {cell['late']}"
    )


def tell_rounds(report: dict, count: int) -> None:
    """Print the medians, and how ours compares."""
    print(f"medians of {count} rounds:")
    for row in report.get("medians", []):
        print(line(row))
    for row in report.get("ratios", []):
        print(rounds.ratio_line(row))


def write(report: dict, path: Path) -> None:
    """All figures so far."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", type=Path, action="append", required=True)
    parser.add_argument("--traces", type=Path, required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--parts", default="roomy,pressed,short")
    parser.add_argument(
        "--loads",
        help="comma between; NAME, or NAME:CLIENTS whatever --clients says; default: all",
    )
    parser.add_argument("--clients", default="1,8,32,64")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--port", type=int, default=31_000)
    parser.add_argument("--logs", type=Path, help="folder for server logs")
    parser.add_argument("--commit", default=git_commit(), help="default: this checkout's")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--variants", help="of those of `variants`, comma between; default: all")
    parser.add_argument("--flags", default="", help="for every server, as '--page-size 64'")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=0, help="of each server's own; 0: shared")
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="chat loads start no request after"
    )
    return parser.parse_args()


def main() -> None:
    """Command line."""
    parsed = arguments()
    chosen = loads.chosen(parsed.loads, parsed.clients)
    roomy = tuple(one for one in chosen if one in loads.ROOMY)
    pressed = tuple(one for one in chosen if one in loads.PRESSED)
    pressed += (loads.SHORT,) if "short" in parsed.parts.split(",") else ()
    folder = parsed.logs or Path(tempfile.mkdtemp())
    report: dict = {
        "machine": machine(parsed.commit),
        "agree": {},
        "shared_prefix": {},
        "cells": [],
    }
    print(json.dumps(report["machine"]), flush=True)

    made = groups(parsed)
    started = [server for group in made for server in group.servers]
    keep_clients_off(started)
    begin = time.monotonic()
    up = start_all(started, folder)
    print(
        f"{len(up)} of {len(started)} servers up after {time.monotonic() - begin:.0f} s", flush=True
    )
    try:
        for group in made:
            group.servers[:] = [server for server in group.servers if server in up]
            for server in group.servers:
                check(server, group, report)
                write(report, parsed.json)
            for row in measure(group, roomy if group.roomy else pressed, up, parsed):
                report["cells"].append(row)
                print(line(row), flush=True)
                for failure in row.get("failures", [])[:2]:
                    print("   ", failure, flush=True)
                report["medians"] = rounds.medians(report["cells"])
                report["ratios"] = rounds.ratios(report["cells"], pairs(made))
                write(report, parsed.json)
            for server in () if group.roomy else group.servers:
                note_shared_prefix(server, report, flush=False)
                write(report, parsed.json)
    finally:
        for server in started:
            server.stop()
    if parsed.rounds > 1:
        tell_rounds(report, parsed.rounds)
    differ = [one.name for one in started if one.ours and not right(one.name, report)]
    if differ:
        sys.exit(f"answers from the cache are not those without: {', '.join(differ)}")


if __name__ == "__main__":
    main()
