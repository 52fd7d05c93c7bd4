"""`sgl-kimi-k3 dashboard --server URL`: serve the page until told to stop."""

from __future__ import annotations

import contextlib
import os
import socket
import webbrowser
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

SERVER = "http://127.0.0.1:30000"
PORT = 30080
NEEDED = ("httpx", "numpy", "prometheus_client", "rich", "starlette", "uvicorn")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Show one server's cache, memory and latency as a web page."
    add_server_arguments(parser)
    parser.add_argument(
        "--port", type=int, default=PORT, help="of the page (default %(default)s; 0: any free one)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of the page (default %(default)s, this machine only; it asks no password)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server is watched, and how often."""
    parser.add_argument(
        "--server", default=SERVER, metavar="URL", help="SGLang's address (default %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SGLANG_API_KEY"),
        metavar="KEY",
        help="the server's --api-key (default: the environment's SGLANG_API_KEY)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="between two readings (default %(default)s)",
    )


def check_installed() -> None:
    """ValueError, with the command to run, unless everything needed is there."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        told = ", ".join(missing)
        raise ValueError(f"{told} not installed: run  pip install 'sgl-kimi-k3[watch]'")


def check_interval(seconds: float) -> None:
    """ValueError unless it makes sense."""
    if not 0.2 <= seconds <= 60:
        raise ValueError(f"--interval {seconds:g}: must be 0.2 to 60 seconds")


def run(options: argparse.Namespace) -> int:
    """Serve the page; the exit status is 0 when stopped by Ctrl-C."""
    check_installed()
    import uvicorn  # noqa: PLC0415  # --help works without it

    from sgl_kimi_k3.dashboard.app import app  # noqa: PLC0415
    from sgl_kimi_k3.dashboard.watcher import Watcher  # noqa: PLC0415

    check_interval(options.interval)
    watcher = Watcher(options.server, api_key=options.api_key, interval_s=options.interval)
    listener = _listen(options.host, options.port)
    shown = "127.0.0.1" if options.host in {"0.0.0.0", "::"} else options.host  # noqa: S104
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"
    print(f"dashboard of {watcher.url}: {url}  (Ctrl-C ends it)", flush=True)  # noqa: T201
    if options.open:
        webbrowser.open(url)
    config = uvicorn.Config(
        app(watcher, host=options.host),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down, and passes it on
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port}: must be 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: {_why(error)}; choose another --port"
        ) from None


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
