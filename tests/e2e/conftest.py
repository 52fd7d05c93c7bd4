"""Servers by name, each for all the tests that ask for it; they sleep while idle.

- `roomy`: everything fits, a state every 16 tokens of a prompt and every 32 of an answer while
  memory is free, chunks of 64 tokens.
- `tight`: an arena of eight states and 1,000 tokens for twelve requests, optimistic admission,
  chunks of 48 tokens that are no multiple of the grid: eviction and retraction are daily life.
- `timed`: started by SGLang's own command line, pages of 64, junctions only, requests time out and
  are explained.
- `apart`: two schedulers under DP attention, each with an arena of 16 states and 1,500 tokens.
- `drafting`: as `roomy`, with draft windows of 6 tokens; retracts at every 20th step without need.
- `spread`: as `roomy`, on two ranks of which each holds every second token's row (DCP).

A server takes half a minute of one core to start and 2 to 4 GB.  So tests run in an order in which
those of one server follow each other, the next server is started meanwhile, and each is checked and
ended behind its last test (`Servers`).
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl_kimi_k3.demo.checkpoint import ensure
from tests.e2e.server import command, serving

WAITING_S, RUNNING_S = 2.0, 20.0
ROOMY = {"GRID": "16", "INTERVAL": "64", "OPPORTUNISTIC": "16"}
ROOM = ["--max-total-tokens", "16000", "--max-mamba-cache-size", "200"]
ROOM += ["--max-running-requests", "16", "--chunked-prefill-size", "64"]
ROOM += ["--mamba-track-interval", "32"]
MODULES = ("attention_replicas", "dashboard", "kits", "drafts", "spread_cache")
MODULES += ("reuse", "equality", "metrics", "start", "two_nodes")


# -- which servers --


def roomy_server(model):
    return {"argv": command(model, ROOM), "options": ROOMY}


def drafting_server(model):
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    forced = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    return {"argv": command(model, ROOM + flags), "options": ROOMY, "env": forced}


def tight_server(model):
    flags = ["--max-total-tokens", "1000", "--max-mamba-cache-size", "8"]
    flags += ["--max-running-requests", "12", "--chunked-prefill-size", "48"]
    flags += ["--schedule-conservativeness", "0.1"]
    options = {"GRID": "32", "INTERVAL": "64", "OPPORTUNISTIC": "32"}
    hopeful = {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1"}  # again soon after a retraction
    return {"argv": command(model, flags), "options": options, "env": hopeful}


def timed_server(model):
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    argv += ["--radix-cache-backend", "kimi_k3", "--device", "cpu", "--host", "127.0.0.1"]
    argv += ["--trust-remote-code", "--enable-metrics", "--enable-cache-report", "--sleep-on-idle"]
    argv += ["--max-total-tokens", "16000", "--max-mamba-cache-size", "64"]
    argv += ["--max-running-requests", "4", "--page-size", "64"]
    options = {"GRID": "64", "INTERVAL": "0", "OPPORTUNISTIC": "0", "EXPLAIN": "1"}
    timeouts = {
        "SGLANG_REQ_WAITING_TIMEOUT": str(WAITING_S),
        "SGLANG_REQ_RUNNING_TIMEOUT": str(RUNNING_S),
    }
    return {"argv": argv, "options": options, "env": timeouts}


def apart_server(model):
    flags = ["--tp-size", "2", "--attn-dp-size", "2", "--max-running-requests", "16"]
    flags += ["--max-total-tokens", "1500", "--max-mamba-cache-size", "32"]
    flags += ["--chunked-prefill-size", "128"]
    options = {"INTERVAL": "0", "OPPORTUNISTIC": "64"}
    return {"argv": command(model, flags), "options": options, "env": two_cores()}


def spread_server(model):
    flags = ["--tp-size", "2", "--dcp-size", "2", "--max-running-requests", "16"]
    flags += ["--max-total-tokens", "8000", "--max-mamba-cache-size", "200"]
    flags += ["--chunked-prefill-size", "64"]
    return {"argv": command(model, flags), "options": ROOMY, "env": two_cores()}


def two_cores():
    """SGLang binds each rank of a CPU to a core that is named."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}


RECIPES = {
    "apart": apart_server,
    "roomy": roomy_server,
    "drafting": drafting_server,
    "spread": spread_server,
    "tight": tight_server,
    "timed": timed_server,
}


def asked_for(item):
    """Names of the servers that a test asks for."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [name for name in RECIPES if name in item.fixturenames or name in params]


# -- when --


def pytest_collection_modifyitems(items):
    """Modules in the order of `MODULES`; a test of another one when its servers are first up."""
    ours = [item for item in items if item.path.parent.name == "e2e"]
    first = {}

    def place(item):
        name = item.path.stem.removeprefix("test_")
        if name in MODULES:
            return MODULES.index(name)
        return max((first.get(server, 0) for server in asked_for(item)), default=len(MODULES))

    for item in sorted(ours, key=place, reverse=True):
        if item.path.stem.removeprefix("test_") in MODULES:
            first.update(dict.fromkeys(asked_for(item), place(item)))
    ordered = iter(sorted(ours, key=place))
    items[:] = [next(ordered) if item.path.parent.name == "e2e" else item for item in items]


class Servers:
    """Starts each server while the tests of the one before it run, and ends it after its last.

    Args:
        items: the tests, in order.
        model: what they serve.
        folder: for logs.
    """

    def __init__(self, items, model, folder):
        self._model, self._folder = model, folder
        self.last = {name: item for item in items for name in asked_for(item)}
        self._coming = list(dict.fromkeys(name for item in items for name in asked_for(item)))
        self._thread = ThreadPoolExecutor(1)  # one at a time; a server ends with its thread
        self._started = {}

    def get(self, name):
        """The server, up; the next one is on its way."""
        self._start(name)
        server = self._started[name][1].result()
        if self._coming:
            self._start(self._coming[0])
        return server

    def _start(self, name):
        if name not in self._started:
            log = self._folder / f"{name}.log"
            context = serving(log=log, model=self._model, **RECIPES[name](self._model))
            self._started[name] = context, self._thread.submit(context.__enter__)
        if name in self._coming:
            self._coming.remove(name)

    def end(self, name):
        """Check its books and end it."""
        context, server = self._started.pop(name)
        if server.exception() is None:
            context.__exit__(None, None, None)

    def close(self):
        """End what is left."""
        for name in list(self._started):
            self.end(name)
        self._thread.shutdown()


@pytest.fixture(scope="session", autouse=True)
def _terminated_runs_end_their_servers():
    """SIGTERM would end pytest without its fixtures, and leave the servers to the kernel."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def model():
    return str(ensure())


@pytest.fixture(scope="session")
def servers(request, model, tmp_path_factory):
    made = Servers(request.session.items, model, tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _ended_behind_their_last_test(request):
    yield
    if asked_for(request.node):
        servers = request.getfixturevalue("servers")
        for name in asked_for(request.node):
            if servers.last[name] is request.node:
                servers.end(name)


def _fixture(name):
    @pytest.fixture(scope="module", name=name)
    def server(servers):
        return servers.get(name)

    return server


apart, roomy, drafting, spread, tight, timed = map(_fixture, RECIPES)
