"""One server per configuration for the whole session; they sleep while idle.

- `roomy`: everything fits, a state every 16 tokens while memory is free, chunks of 64 tokens.
- `tight`: an arena of eight states and 1,000 tokens for twelve requests, optimistic admission,
  chunks of 48 tokens that are no multiple of the grid: eviction and retraction are daily life.
- `timed`: started by SGLang's own command line, pages of 64, junctions only, requests time out and
  are explained.
- `apart`: two schedulers under DP attention, each with an arena of 16 states and 1,500 tokens.
- `drafting`: as `roomy`, with draft windows of 6 tokens; retracts at every 20th step without need.
- `spread`: as `roomy`, on two ranks of which each holds every second token's row (DCP).
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from sgl_kimi_k3.demo.checkpoint import ensure
from tests.e2e.server import command, serving

WAITING_S, RUNNING_S = 2.0, 20.0
ROOMY = {"GRID": "16", "INTERVAL": "64", "OPPORTUNISTIC": "16"}


TOGETHER = {"roomy": "room", "drafting": "room", "spread": "room"}
TOGETHER |= {"tight": "short", "timed": "short", "apart": "short"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Under `-n 2 --dist loadgroup`: who asks the same servers runs in one process, in order."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            params = item.callspec.params.values() if hasattr(item, "callspec") else ()
            named = [*item.fixturenames, *(one for one in params if isinstance(one, str))]
            servers = [TOGETHER[name] for name in named if name in TOGETHER]
            item.add_marker(pytest.mark.xdist_group(min(servers, default=item.path.stem)))


@pytest.fixture(scope="session", autouse=True)
def _terminated_runs_end_their_servers():
    """SIGTERM would end pytest without its fixtures, and leave the servers behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def model():
    return str(ensure())


ROOM = ["--max-total-tokens", "16000", "--max-mamba-cache-size", "200"]
ROOM += ["--max-running-requests", "16", "--chunked-prefill-size", "64"]


@pytest.fixture(scope="session")
def roomy(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("roomy") / "server.log"
    with serving(command(model, ROOM), log=log, model=model, options=ROOMY) as server:
        yield server


@pytest.fixture(scope="session")
def drafting(model, tmp_path_factory):
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    forced = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    log = tmp_path_factory.mktemp("drafting") / "server.log"
    argv = command(model, ROOM + flags)
    with serving(argv, log=log, model=model, options=ROOMY, env=forced) as server:
        yield server


@pytest.fixture(scope="session")
def tight(model, tmp_path_factory):
    flags = ["--max-total-tokens", "1000", "--max-mamba-cache-size", "8"]
    flags += ["--max-running-requests", "12", "--chunked-prefill-size", "48"]
    flags += ["--schedule-conservativeness", "0.1"]
    options = {"GRID": "32", "INTERVAL": "64", "OPPORTUNISTIC": "32"}
    hopeful = {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1"}  # again soon after a retraction
    log = tmp_path_factory.mktemp("tight") / "server.log"
    argv = command(model, flags)
    with serving(argv, log=log, model=model, options=options, env=hopeful) as server:
        yield server


@pytest.fixture(scope="session")
def timed(model, tmp_path_factory):
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
    log = tmp_path_factory.mktemp("timed") / "server.log"
    with serving(argv, log=log, model=model, options=options, env=timeouts) as server:
        yield server


@pytest.fixture(scope="session")
def apart(model, tmp_path_factory):
    flags = ["--tp-size", "2", "--attn-dp-size", "2", "--max-running-requests", "16"]
    flags += ["--max-total-tokens", "1500", "--max-mamba-cache-size", "32"]
    flags += ["--chunked-prefill-size", "128"]
    options = {"INTERVAL": "0", "OPPORTUNISTIC": "64"}
    log = tmp_path_factory.mktemp("apart") / "server.log"
    argv = command(model, flags)
    with serving(argv, log=log, model=model, options=options, env=two_cores()) as server:
        yield server


@pytest.fixture(scope="session")
def spread(model, tmp_path_factory):
    flags = ["--tp-size", "2", "--dcp-size", "2", "--max-running-requests", "16"]
    flags += ["--max-total-tokens", "8000", "--max-mamba-cache-size", "200"]
    flags += ["--chunked-prefill-size", "64"]
    log = tmp_path_factory.mktemp("spread") / "server.log"
    argv = command(model, flags)
    with serving(argv, log=log, model=model, options=ROOMY, env=two_cores()) as server:
        yield server


def two_cores():
    """SGLang binds each rank of a CPU to a core that is named."""
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
