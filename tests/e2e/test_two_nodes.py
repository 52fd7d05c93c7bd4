"""`launch/two_nodes.sh` run twice: two machines of one CPU each, one server at TP 2 over gloo."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.e2e.prompts import words
from tests.e2e.server import end, excerpt, free_port, serving, start

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).resolve().parents[2] / "launch/two_nodes.sh"
# What differs from two machines with GPUs; an arena of four states and 900 tokens.
SMALL = ["--attention-backend", "torch_native", "--sleep-on-idle", "--chunked-prefill-size", "128"]
SMALL += ["--max-total-tokens", "900", "--max-mamba-cache-size", "4"]
UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}  # seconds that say nothing of two machines
VARIABLES = {"GPUS": "2", "MOE": "auto", "CONTEXT": "1024", "REQUESTS": "4", "INTERVAL": "128"}


@pytest.fixture(scope="module")
def both(model, tmp_path_factory):
    """The server, whose log is the first machine's, and the second machine's log."""
    folder = tmp_path_factory.mktemp("two_nodes")
    first, second = folder / "0.log", folder / "1.log"
    cores = sorted(os.sched_getaffinity(0))
    shared = VARIABLES | {"MODEL": model, "HEAD": f"127.0.0.1:{free_port()}"}

    def variables(rank):
        core = str(cores[0] if rank == 0 else cores[-1])
        return shared | UNCOMPILED | {"RANK": str(rank), "SGLANG_CPU_OMP_THREADS_BIND": core}

    argv = ["bash", str(SCRIPT), *SMALL]
    environment = variables(1) | {"KIMI_K3_CHECK": "1"}
    other = start([*argv, "--port", str(free_port())], log=second, env=environment)
    try:
        with serving(argv, log=first, model=model, env=variables(0)) as server:
            yield server, second
            assert other.poll() is None, excerpt(second)
    finally:
        end(other)


def decisions(log):
    """Hash by count, as a rank logged them whenever it was idle."""
    found = re.findall(r"idle after (\d+) decisions, hash (\w+)", log.read_text("utf-8"))
    return {int(count): hashed for count, hashed in found}


def test_turns_resume_and_both_ranks_decide_alike(both):
    server, second = both
    prompt, cached = words("two nodes", 150), []
    for turn in range(3):
        answer = server.generate(prompt, 4)
        cached.append(answer.cached_tokens)
        asked, prompt = prompt, [*prompt, *answer.ids, *words(f"more {turn}", 20)]
    assert cached == [0, 153, 177], "each turn resumes at the end of the one before"
    assert server.generate(asked, 4, cache_salt="alone").ids == answer.ids
    for stranger in range(6):
        server.generate(words(f"stranger {stranger}", 200), 4)
    told = server.assert_idle_books()
    assert told["kimi_k3:checkpoints_evicted_total"] > 0
    assert told["kimi_k3:moves_total"] > 0

    first = decisions(server.log)
    assert len(first) >= 10, "one line after each request"
    deadline = time.monotonic() + 30.0
    while max(decisions(second), default=0) < max(first):  # its own idle turn, its own log
        assert time.monotonic() < deadline, (first, decisions(second))
        time.sleep(0.2)
    assert decisions(second) == first
