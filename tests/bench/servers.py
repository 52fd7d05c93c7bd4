"""Start and stop the servers a benchmark compares.

Several stand ready on one GPU at once and one is measured at a time: an idle server runs nothing on
the GPU, and starting one takes longer than measuring it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.bench.load import post

if TYPE_CHECKING:
    from collections.abc import Iterable

READY = "fired up and ready to roll"
START_S = 420.0
# Events bring new ids only: all ids so far in every event cost the two processes that write and
# read them more than a decode step of these models.
BASE_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --host 127.0.0.1 --attention-backend triton "
    "--chunked-prefill-size 16384 --incremental-streaming-output"
)
STOCK = "--enable-unified-memory --mamba-radix-cache-strategy extra_buffer"
STOCK_SPLIT = "--mamba-radix-cache-strategy extra_buffer"
OURS = "--radix-cache-backend kimi_k3"
# SGLang leaves them off for KDA; here they are on (`resolution.may_graph_prefills`).
PREFILL_GRAPHS = "--cuda-graph-backend-prefill breakable --cuda-graph-max-bs-prefill 2048"
# `weights.py` for both; stock runs without this backend's hooks.
ENTRY = Path(__file__).resolve().parent / "entry"
ROOT = ENTRY.parents[2]  # the checkout, for `tests.bench`
PLUGINS_OF_OURS = "kimi_k3,bench_weights"
PLUGINS_OF_STOCK = "bench_weights"


@dataclass
class Server:
    """One server: how it is started, and what its log said."""

    name: str
    config: Path
    flags: str
    port: int
    gpu: str = "0"
    env: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()  # that it runs on; none: any
    ours: bool = False
    process: subprocess.Popen | None = None
    log: Path | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, folder: Path) -> None:
        """Start it; `wait` says when it is up."""
        home = folder / self.name
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.json").write_text(self.config.read_text())
        self.log = folder / f"{self.name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(home)]
        command += f"{BASE_FLAGS} --port {self.port} {self.flags}".split()
        if self.cores:
            command = ["taskset", "--cpu-list", ",".join(map(str, self.cores)), *command]
        with self.log.open("w") as log:
            log.write(" ".join(command) + "\n")
            log.flush()
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment(),
            )

    def environment(self) -> dict[str, str]:
        """Of its processes."""
        known = os.environ.get("PYTHONPATH", "")
        return {
            **os.environ,
            "PYTHONPATH": f"{ENTRY}:{ROOT}:{known}".rstrip(":"),
            "SGLANG_PLUGINS": PLUGINS_OF_OURS if self.ours else PLUGINS_OF_STOCK,
            "CUDA_VISIBLE_DEVICES": self.gpu,
            **self.env,
        }

    def wait(self) -> bool:
        """Whether it came up."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.alive():
            if READY in self.text():
                return True
            time.sleep(1)
        print(f"{self.name} did not start:\n{self.text()[-3000:]}")
        return False

    def alive(self) -> bool:
        """Whether its main process runs and SGLang has not decided to end it."""
        return self.process is not None and self.process.poll() is None

    def text(self) -> str:
        """Its log so far."""
        return "" if self.log is None else self.log.read_text(errors="replace")

    def move(self, cores: tuple[int, ...]) -> None:
        """Run on these cores from now on, with every thread."""
        self.cores = cores
        if self.process is not None and self.alive():
            main = psutil.Process(self.process.pid)
            for process in (main, *main.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for thread in process.threads():
                        with contextlib.suppress(ProcessLookupError):  # it ended
                            os.sched_setaffinity(thread.id, cores)

    def stop(self) -> None:
        """End the whole process group."""
        if self.process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
                time.sleep(1)

    def flush(self) -> bool:
        """Forget every prefix; False if the server is gone."""
        for _ in range(20):
            try:
                post(f"{self.url}/flush_cache")
            except urllib.error.HTTPError:
                time.sleep(0.5)  # it refuses while requests run
            except (OSError, urllib.error.URLError):
                return False
            else:
                return True
        return False

    def figures(self, since: int) -> dict[str, int]:
        """Peak of running requests and retractions, from its log after `since` characters."""
        text = self.text()[since:]
        running = [int(n) for n in re.findall(r"#running-req: (\d+)", text)]
        retracted = [int(n) for n in re.findall(r"#retracted_reqs: (\d+)", text)]
        return {"running_peak": max(running, default=0), "retractions": sum(retracted)}


def take_stage(server: Server, servers: Iterable[Server]) -> None:
    """Let it change places with whoever has the first cores, so that all are measured there."""
    holder = min(servers, key=lambda one: one.cores)
    if holder.cores != server.cores:
        there, here = holder.cores, server.cores
        holder.move(here)
        server.move(there)


def start_all(servers: Iterable[Server], folder: Path, *, apart_s: float = 8.0) -> list[Server]:
    """Start them a little apart (each reads how much GPU memory is free); those that came up."""
    servers = list(servers)
    for server in servers:
        server.start(folder)
        time.sleep(apart_s)
    return [server for server in servers if server.wait()]
