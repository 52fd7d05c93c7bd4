"""`sgl-kimi-k3 top`: the dashboard's figures in a terminal, or once as JSON for scripts.

The JSON of `--once --json` is `Watcher.summary`; its keys are documented in dashboard/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from sgl_kimi_k3.dashboard.command import (
    add_server_arguments,
    check_installed,
    check_interval,
)

if TYPE_CHECKING:
    import argparse

    from sgl_kimi_k3.dashboard.watcher import Watcher

WINDOW_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Show one server's cache, memory and latency in the terminal."
    add_server_arguments(parser)
    parser.add_argument(
        "--window",
        type=float,
        default=WINDOW_S,
        metavar="SECONDS",
        help="what rates and latencies look back on (default %(default)g)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="take two readings, one interval apart, print them and end; status 1 if the server "
        "does not answer",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --once")


def run(options: argparse.Namespace) -> int:
    """Show until Ctrl-C, or once."""
    check_installed()
    from sgl_kimi_k3.dashboard.watcher import Watcher  # noqa: PLC0415  # --help works without it

    check_interval(options.interval)
    if not 1 <= options.window <= 3600:
        raise ValueError(f"--window {options.window:g}: must be 1 to 3600 seconds")
    if options.json and not options.once:
        raise ValueError("--json needs --once: the live view is for people")
    watcher = Watcher(options.server, api_key=options.api_key, interval_s=options.interval)
    try:
        if options.once:
            return asyncio.run(_once(watcher, options.window, as_json=options.json))
        asyncio.run(_live(watcher, options.window))
    except KeyboardInterrupt:
        pass
    return 0


async def _once(watcher: Watcher, window_s: float, *, as_json: bool) -> int:
    from rich.console import Console  # noqa: PLC0415

    from sgl_kimi_k3.dashboard.terminal import screen  # noqa: PLC0415

    async with contextlib.aclosing(watcher):
        await watcher.poll()
        if watcher.status.state == "ok":
            await asyncio.sleep(watcher.interval_s)
            await watcher.poll()
        found: dict[str, Any] = watcher.summary(window_s)
    if as_json:
        print(json.dumps(found, indent=2, allow_nan=False))  # noqa: T201  # what was asked for
    else:
        Console().print(screen(found, now=time.time()))
    if found["status"]["state"] == "ok":
        return 0
    print(f"sgl-kimi-k3: {found['status']['message']}", file=sys.stderr)  # noqa: T201
    return 1


async def _live(watcher: Watcher, window_s: float) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from sgl_kimi_k3.dashboard.terminal import screen  # noqa: PLC0415

    console = Console()
    # A terminal gets its own page back at the end; a pipe gets one screen after another.
    page = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    async with contextlib.aclosing(watcher):
        with page if console.is_terminal else contextlib.nullcontext():
            while True:
                started = time.monotonic()
                await watcher.poll()
                now = screen(watcher.summary(window_s), now=time.time(), height=console.height)
                if console.is_terminal:
                    page.update(now, refresh=True)
                else:
                    console.print(now)
                await asyncio.sleep(max(0.1, watcher.interval_s - (time.monotonic() - started)))
