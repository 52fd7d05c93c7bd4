"""How a server starts, and how it refuses to: non-zero, in one line that names value and fix."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.prompts import words
from tests.e2e.server import STRICT, alive, command, end, excerpt, free_port, start

pytestmark = pytest.mark.e2e

PATIENCE_S = 400.0
BACKEND = ["--radix-cache-backend", "kimi_k3"]
SMALL = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 2}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_positions": 512, "dtype": "float32", **SMALL}

# name -> (flags, options, what the one line must say)
REFUSED = {
    "grid": (
        [],
        {"KIMI_K3_GRID": "96", "KIMI_K3_INTERVAL": "128"},
        ("KIMI_K3_INTERVAL=128", "KIMI_K3_GRID=96", "96 and 192"),
    ),
    "grid as a flag": (
        ["--kimi-k3-grid", "96", "--kimi-k3-interval", "128"],
        {},
        ("KIMI_K3_INTERVAL=128", "KIMI_K3_GRID=96", "96 and 192"),
    ),
    "unknown option": ([], {"KIMI_K3_FOO": "1"}, ("KIMI_K3_FOO", "KIMI_K3_GRID")),
    "page size": (
        ["--page-size", "128"],
        {},
        ("--page-size 128", "KIMI_K3_GRID=64", "Use --page-size 1 or 64", "KIMI_K3_GRID=128"),
    ),
    "host tier": (
        ["--enable-hierarchical-cache"],
        {},
        ("--enable-hierarchical-cache", "True", "Drop --enable-hierarchical-cache"),
    ),
    "undersized pool": (
        ["--max-total-tokens", "100", "--max-mamba-cache-size", "2"],
        {},
        ("--max-total-tokens 100", "--max-mamba-cache-size 2", "bytes are missing", "raise"),
    ),
    "another backend": (
        ["--attention-backend", "triton"],
        {},
        ("--attention-backend triton", "torch_native"),
    ),
    "no recurrent state": ([], {}, ("GPT2LMHeadModel", "no recurrent state", "sglang serve")),
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model that stock SGLang loads on a CPU, without recurrent state."""
    folder = tmp_path_factory.mktemp("gpt2")
    folder.joinpath("config.json").write_text(json.dumps(GPT2), "utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def refusals(model, gpt2):
    """Answers of the command line by case."""
    cases = [
        {
            "argv": ["serve", gpt2 if name == "no recurrent state" else model, *flags],
            "env": options,
        }
        for name, (flags, options, _) in REFUSED.items()
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.refusals"],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={**os.environ, **STRICT},
    )
    return dict(zip(REFUSED, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(refusals, name):
    found = refusals[name]
    assert found["status"] == 2, found["output"]
    assert "Traceback" not in found["output"]
    said = [line for line in found["output"].splitlines() if line.startswith("sgl-kimi-k3: ")]
    assert len(said) == 1, found["output"]
    for part in REFUSED[name][2]:
        assert part in said[0]


def fail_to_start(argv, tmp_path, env):
    """Run to the end; status and log of a start that must fail."""
    log = tmp_path / "server.log"
    process = start([*argv, "--port", str(free_port())], log=log, env=env)
    try:
        status = process.wait(PATIENCE_S)
    finally:
        end(process)
    assert status != 0, excerpt(log)
    text = log.read_text("utf-8", errors="replace")
    assert "Uvicorn running" not in text
    return text


def stock(model):
    """SGLang's own command line, asked for our backend."""
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *BACKEND]
    argv += ["--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu"]
    argv += ["--attention-backend", "torch_native", "--host", "127.0.0.1"]
    return [*argv, "--max-total-tokens", "512", "--max-running-requests", "2"]


def test_without_the_plugin_the_backend_is_refused(gpt2, tmp_path):
    """No silent fallback to stock's tree; the model is one that stock serves."""
    log = fail_to_start(stock(gpt2), tmp_path, {"SGLANG_PLUGINS": "none"})
    assert "--radix-cache-backend='kimi_k3' is not registered" in log


@pytest.fixture
def newer_sglang(tmp_path):
    """Environment in which the installed SGLang says it is 0.5.24."""
    tmp_path.joinpath("sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "_found = metadata.version\n"
        "metadata.version = lambda name: '0.5.24' if name == 'sglang' else _found(name)\n",
        "utf-8",
    )
    return {"PYTHONPATH": str(tmp_path)}


SAID = "sgl-kimi-k3 needs sglang 0.5.23, found 0.5.24: pip install sglang==0.5.23"


def test_another_sglang_is_refused_in_one_line(model, newer_sglang):
    done = subprocess.run(
        command(model, []),
        env={**os.environ, **STRICT, **newer_sglang},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"sgl-kimi-k3: {SAID}\n"
    assert done.stdout == ""


def test_another_sglang_is_refused_by_its_own_command_line_too(gpt2, newer_sglang, tmp_path):
    """The plugin cannot stop SGLang, but the backend it registers can."""
    log = fail_to_start(stock(gpt2), tmp_path, newer_sglang)
    assert f"compat.IncompatibleError: {SAID}\n" in log


def test_sglangs_own_command_line_serves(timed):
    """One flag is enough; the server names the backend, and resumes inside a page of 64."""
    assert timed.info()["radix_cache_backend"] == "kimi_k3"
    log = timed.read_log()
    assert "kimi_k3 arena: " in log
    assert "kimi_k3 cache: Options(interval=0, grid=64, opportunistic=0" in log
    prompt = words("own command line", 70)
    timed.generate(prompt)
    assert timed.generate([*prompt, *prompt[:5]]).cached_tokens == 70


def test_processes_end_with_their_server(tmp_path):
    """What every test here relies on: `end` takes children along that ignore SIGTERM."""
    code = "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
    child = f"{code} print('up', flush=True); time.sleep(60)"
    parent = f"{code} print('up', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log"
    process = start([sys.executable, "-c", parent], log=log, env={})
    while log.read_text().count("up") < 2:
        assert process.poll() is None
    assert len(alive(process.pid)) == 2
    end(process)
    assert not alive(process.pid)
