"""A real SGLang server under our backend: started, asked, checked and ended.

`serving` starts one in a process group of its own and ends the whole group, whatever happened in
between. Before that it waits for idle and checks what every server must show there: SGLang's leak
checks silent (they are strict: a difference is an exception in the log), pool and tree recounted
without a violation, every byte of the arena in one part, nothing live that the tree does not hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_S = 600.0
ANSWER_S = 240.0
STRICT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
}
FAULT = re.compile(
    r"Traceback|leak detected|Leak Detected|violation|AssertionError|Exception in ASGI"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of `/generate`."""

    ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish: str  # "length", "stop" or "abort"

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Reply:
        """From the endpoint's JSON; a request aborted in the queue has no counts."""
        meta = answer["meta_info"]
        return cls(
            ids=tuple(answer["output_ids"]),
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            finish=meta["finish_reason"]["type"],
        )


class Server:
    """One running server: its endpoints, its log, its processes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, model: str) -> None:
        self.process = process
        self.base_url = f"http://127.0.0.1:{port}"
        self.log = log
        self.model = model

    # -- asking --

    def post(self, path: str, body: Any = None, *, timeout: float = ANSWER_S) -> requests.Response:
        """POST JSON; the caller judges the status."""
        return self._ask("POST", path, json=body, timeout=timeout)

    def get(self, path: str) -> requests.Response:
        """GET, successful."""
        answer = self._ask("GET", path, timeout=ANSWER_S)
        answer.raise_for_status()
        return answer

    def _ask(self, method: str, path: str, **fields: Any) -> requests.Response:
        try:
            return requests.request(method, self.base_url + path, **fields)
        except requests.ConnectionError:
            raise AssertionError(f"the server is gone:\n{excerpt(self.log)}") from None

    def generate(self, prompt: Sequence[int], new_tokens: int = 8, **fields: Any) -> Reply:
        """Greedy continuation of `prompt` (token ids) by exactly `new_tokens`."""
        answer = self.post("/generate", body(prompt, new_tokens, **fields))
        assert answer.status_code == 200, answer.text
        return Reply.of(answer.json())

    def chat(
        self, messages: Sequence[Mapping[str, str]], new_tokens: int = 8, **fields: Any
    ) -> Any:
        """One greedy answer of the OpenAI endpoint, as JSON."""
        wanted = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": new_tokens,
            "temperature": 0,
        }
        answer = self.post("/v1/chat/completions", {**wanted, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """End the requests whose id begins with `rid` (so SGLang reads it), or all."""
        answer = self.post("/abort_request", {"rid": rid, "abort_all": everything}, timeout=30)
        answer.raise_for_status()

    def flush(self) -> None:
        """Empty the cache; SGLang refuses while something runs, so wait up to 30 s for idle."""
        answer = self.post("/flush_cache?timeout=30")
        assert answer.status_code == 200, answer.text

    def info(self) -> dict[str, Any]:
        """SGLang's arguments and live state."""
        return self.get("/server_info").json()

    def metrics(self) -> Metrics:
        """Everything on `/metrics` now."""
        return Metrics.parse(self.get("/metrics").text)

    # -- watching --

    def read_log(self) -> str:
        """Standard output and error so far."""
        return self.log.read_text("utf-8", errors="replace")

    def faults(self) -> list[str]:
        """Log lines that no healthy server writes."""
        return [line for line in self.read_log().splitlines() if FAULT.search(line)]

    def assert_healthy(self) -> None:
        """Alive and silent."""
        assert not self.faults(), excerpt(self.log)
        assert self.process.poll() is None, excerpt(self.log)

    def settle(self, *, timeout: float = 60.0) -> Metrics:
        """Wait until nothing runs and the figures are of that moment; returns the metrics then.

        They may be 0.2 s old, from before the last answer's end: idle ones must be told twice.
        """
        deadline = time.monotonic() + timeout
        before: dict[str, float] = {}
        while True:
            found = self.metrics()
            busy = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "kimi_k3:pins")
            idle = not any(found[name] for name in busy)
            if idle and found.ours() == before:
                return found
            before = found.ours() if idle else {}
            assert time.monotonic() < deadline, f"not idle after {timeout} s: {found.ours()}"
            self.assert_healthy()
            time.sleep(0.3)

    def assert_idle_books(self) -> Metrics:
        """Idle invariants, from `/metrics`."""
        found = self.settle()
        time.sleep(0.5)  # the scheduler checks itself in its next idle turn
        self.assert_healthy()
        found = self.metrics()
        assert found["kimi_k3:pins"] == 0, found.ours()
        assert found["kimi_k3:live_states"] == found["kimi_k3:cached_states"], found.ours()
        assert found["kimi_k3:live_blocks"] == found["kimi_k3:cached_blocks"], found.ours()
        assert found.sum("kimi_k3:arena_bytes") == self.arena_bytes(), found.ours()
        return found

    def arena_bytes(self) -> int:
        """Bytes of all ranks' arenas, as logged at start."""
        return sum(map(int, re.findall(r"kimi_k3 arena: (\d+) bytes", self.read_log())))

    def state_tokens(self) -> float:
        """Weight of one state in tokens of KV."""
        state, block = self._logged(r"a state is (\d+) bytes"), self._logged(r"\(s\) (\d+) bytes")
        return int(state) / int(block)

    def _logged(self, pattern: str) -> str:
        found = re.search(pattern, self.read_log())
        assert found, f"no {pattern!r} in {excerpt(self.log)}"
        return found[1]


class Metrics(dict[str, float]):
    """Samples of a Prometheus text by `name{labels}`; a bare name is the sum over its labels."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Our labels only: SGLang's (model, ranks) are the same everywhere here."""
        found = cls()
        for line in text.splitlines():
            if line.startswith("#") or not line:
                continue
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            own = re.findall(
                r'(?:^|,)((?:kind|cause|reason|part|side|limit|value|number)="[^"]*")',
                labels.rstrip("}"),
            )
            if own:
                found[f"{name}{{{','.join(sorted(own))}}}"] = float(value)
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def sum(self, name: str) -> float:
        """Over all labels."""
        return self[name]

    def ours(self) -> dict[str, float]:
        """The `kimi_k3:` series."""
        return {name: value for name, value in self.items() if name.startswith("kimi_k3:")}

    def since(self, before: Metrics, name: str) -> float:
        """Growth of a counter."""
        return self[name] - before.get(name, 0.0)  # SGLang makes some series late


def body(prompt: Sequence[int], new_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy `/generate` request that always runs to its length."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **fields}


def command(model: str, flags: Sequence[str]) -> list[str]:
    """`sgl-kimi-k3 serve` with what every server here has."""
    script = str(Path(sys.executable).with_name("sgl-kimi-k3"))
    common = ["--host", "127.0.0.1", "--trust-remote-code", "--enable-metrics"]
    return [script, "serve", model, *common, "--enable-cache-report", "--sleep-on-idle", *flags]


@contextlib.contextmanager
def serving(
    argv: Sequence[str],
    *,
    log: Path,
    model: str,
    options: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start `argv` on a free port, wait until it answers, hand it over, check it, end it.

    `options` are ours by name without prefix (`{"GRID": "16"}`), `env` any other variables.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="k3-") as scratch:  # sockets and metric files
        given = {"CHECK": "1", **(options or {})}
        ours = {f"KIMI_K3_{name}": value for name, value in given.items()}
        process = start(
            [*argv, "--port", str(port)], log=log, env={**ours, "TMPDIR": scratch, **(env or {})}
        )
        server = Server(process, port, log, model)
        try:
            _wait_until_up(server)
            yield server
            server.assert_idle_books()
        finally:
            end(process)


def start(argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process in a group of its own, output in `log`, with no option of ours but those given."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KIMI_K3_")}
    with log.open("wb") as output:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **STRICT, **env},
            start_new_session=True,
            preexec_fn=_end_with_this_process,  # noqa: PLW1509  # takes no lock
        )


_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


def _end_with_this_process() -> None:
    """A test run that is killed leaves no server behind."""
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: at once, as SGLang's own way out takes seconds."""
    deadline = time.monotonic() + 20.0
    while alive(process.pid):
        assert time.monotonic() < deadline, f"{alive(process.pid)} outlive SIGKILL"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()


def alive(group: int) -> list[int]:
    """Processes of a group; the dead ones that nobody waits for do not count."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


_PORTS = itertools.count(20_000 + 37 * os.getpid() % 9_000)  # runs side by side begin elsewhere


def free_port() -> int:
    """A port that stays free for the half minute in which a server starts.

    Never twice the same, and below those that Linux gives to outgoing connections.
    """
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("the count has no end")


def excerpt(log: Path, count: int = 50) -> str:
    """Lines of a log for a message: from its first fault on, or the last ones."""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if FAULT.search(line)), len(lines) - count)
    return "\n".join(line[:300] for line in lines[max(0, first) :][:count])


def _wait_until_up(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"ended while starting:\n{excerpt(server.log)}"
        with contextlib.suppress(requests.RequestException):
            if requests.get(server.base_url + "/health", timeout=20).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"not healthy after {START_S} s:\n{excerpt(server.log)}")
