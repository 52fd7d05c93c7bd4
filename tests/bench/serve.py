"""Stock SGLang and this backend, served, on one GPU: `python -m tests.bench.serve --json F`.

For each model (a config of random weights) stock in its strongest configurations and ours are
started with the same memory and measured one after the other, with the same requests:

- `shared_prefix` with room for everything;
- chat loads made from traces, closed loop, at several numbers of clients, in an arena small enough
  that the cache is under pressure, and (`roomy`) without pressure;
- `short`: many clients with short contexts, for how many run at once.

Figures are written after every cell, so that a run that is cut off leaves what it measured.  Run it
from the repository's root with SGLang importable:

    python -m tests.bench.serve --config tests/bench/configs/k3_8l.json --traces DIR --json F
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench import load, shared_prefix
from tests.bench.servers import OURS, STOCK, STOCK_SPLIT, Server, start_all

if TYPE_CHECKING:
    from collections.abc import Iterator

# One arena for all: KV tokens and states whose bytes it is the sum of.
PRESSED = "--max-total-tokens 200000 --max-mamba-cache-size 100 --max-running-requests 256"
ROOMY = "--max-total-tokens 1500000 --max-mamba-cache-size 3000 --max-running-requests 256"
FRACTION = "--mem-fraction-static 0.9"
CELL_S = 75.0  # no cell plays longer; sessions are counted so that few get there


@dataclass(frozen=True)
class Load:
    """One closed loop."""

    name: str
    trace: str
    clients: int
    sessions: int
    longest: int = 32_768


LOADS = (
    Load("airline", "airline-chat", 1, 4),
    Load("airline", "airline-chat", 8, 24),
    Load("airline", "airline-chat", 32, 96),
    Load("airline", "airline-chat", 64, 160),
    Load("agentic", "agentic-coding", 8, 12, 65_536),
    Load("agentic", "agentic-coding", 32, 24, 65_536),
)
ROOMY_LOADS = (Load("roomy", "airline-chat", 8, 24), Load("roomy", "airline-chat", 32, 64))
SHORT = Load("short", "airline-chat", 192, 192, 2_200)


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
    """Stock's strongest for this architecture, and ours.

    Stock's lists leave the text-only K3 class out: it refuses `extra_buffer` for it.
    """
    text_only = "KimiK3LinearForCausalLM" in json.loads(config.read_text())["architectures"]
    if text_only:
        return {"stock": "--enable-unified-memory", "ours": OURS}
    return {"stock": STOCK, "stock split": STOCK_SPLIT, "ours": OURS}


def servers(config: Path, port: int, gpu: str, parts: list[str]) -> list[Server]:
    """All servers of one model."""
    made = []
    for name, flags in variants(config).items():
        for memory, sizes in (("pressed", PRESSED), ("roomy", ROOMY)):
            needed = memory in parts and not (memory == "roomy" and name == "stock split")
            if needed:
                label = f"{config.stem} {memory} {name}".replace(" ", "-")
                port += 1
                made.append(Server(label, config, f"{FRACTION} {sizes} {flags}", port, gpu))
    return made


def cells(server: Server, traces: Path, loads: tuple[Load, ...]) -> Iterator[dict]:
    """Measure one server."""
    for one in loads:
        if not server.flush():
            yield {"server": server.name, "load": one.name, "clients": one.clients, "dead": True}
            return
        since = len(server.text())
        figures = load.run(
            server.url,
            traces / f"{one.trace}.jsonl.gz",
            clients=one.clients,
            count=one.sessions,
            longest=one.longest,
            seconds=CELL_S,
        )
        alive = server.alive()
        yield {
            "server": server.name,
            "load": one.name,
            **figures,
            **server.figures(since),
            "dead": not alive,
        }
        if not alive:
            return


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
        f"{cell['output_tokens_per_s']:6.0f} tok/s  running {cell['running_peak']:3d}  "
        f"retracted {cell['retractions']}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", type=Path, action="append", required=True)
    parser.add_argument("--traces", type=Path, required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--parts", default="roomy,pressed,short")
    parser.add_argument("--loads", default="airline,agentic")
    parser.add_argument("--clients", default="1,8,32,64")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--port", type=int, default=31_000)
    parser.add_argument("--logs", type=Path, help="folder for server logs")
    parser.add_argument("--commit", default=git_commit(), help="default: this checkout's")
    parser.add_argument("--json", type=Path, required=True)
    parsed = parser.parse_args()
    parts = parsed.parts.split(",")
    clients = {int(n) for n in parsed.clients.split(",")}
    pressed = tuple(
        one for one in LOADS if one.name in parsed.loads.split(",") and one.clients in clients
    )
    folder = parsed.logs or Path(tempfile.mkdtemp())
    report: dict = {"machine": machine(parsed.commit), "cells": [], "shared_prefix": {}}
    print(json.dumps(report["machine"]), flush=True)

    started: list[Server] = []
    for at, config in enumerate(parsed.config):
        started += servers(config, parsed.port + 20 * at, parsed.gpu, parts)
    begin = time.monotonic()
    up = start_all(started, folder)
    print(
        f"{len(up)} of {len(started)} servers up after {time.monotonic() - begin:.0f} s", flush=True
    )
    try:
        for server in up:
            roomy = "-roomy-" in server.name
            if roomy:
                figures = shared_prefix.run(server.url)
                report["shared_prefix"][server.name] = figures
                print(server.name, json.dumps(figures), flush=True)
            short = (SHORT,) if "short" in parts else ()
            for cell in cells(server, parsed.traces, ROOMY_LOADS if roomy else pressed + short):
                report["cells"].append(cell)
                print(line(cell), flush=True)
                for failure in cell.get("failures", [])[:2]:
                    print("   ", failure, flush=True)
                parsed.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        for server in started:
            server.stop()


if __name__ == "__main__":
    main()
