"""The README's first command, as a newcomer runs it, and what it says to a wrong call."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.server import free_port

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "launch/quickstart.sh"


def run(*arguments, **options):
    return subprocess.run(
        ["bash", QUICKSTART, *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


@pytest.mark.e2e
def test_quickstart_serves_and_reuses(tmp_path):
    port = free_port()
    result = run("--port", str(port), "--json", "out.json", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["outputs_equal"] is True
    assert out["hit_rate"] > 0.9
    assert [(t["user"], t["turn"]) for t in out["turns"]] == [
        (user, turn) for turn in range(1, 5) for user in range(1, 7)
    ]
    assert all(t["cached_tokens"] > 0.9 * t["prompt_tokens"] for t in out["turns"][1:])
    assert all(t["ttft_s"] > 0 for t in out["turns"])
    server = out["server"]
    assert (server["sglang_version"], server["radix_cache"]) == ("0.5.23", "kimi_k3")
    assert set(server["pool"]["bytes"]) == {
        "states",
        "state_holes",
        "kv",
        "kv_holes",
        "gap",
        "sink",
    }
    with socket.create_server(("127.0.0.1", port)):
        pass  # the server is gone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000: must be 1 to 65535"),
        (["--port", "http"], "--port http: must be 1 to 65535"),
        (["--keeep"], "unknown argument: --keeep"),
        (["--json"], "--json FILE"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_installed(arguments, message, tmp_path):
    result = run(*arguments, env={**os.environ, "PATH": _path_without_python(tmp_path)})
    assert result.returncode == 2
    assert message in result.stderr


def test_help_names_every_option():
    result = run("--help")
    assert result.returncode == 0
    assert all(option in result.stdout for option in ("--port", "--json", "--keep"))


def test_a_machine_without_python_is_told_so(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    result = subprocess.run(
        ["bash", checkout / "launch/quickstart.sh"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": _path_without_python(tmp_path), "HOME": str(tmp_path)},
    )
    assert result.returncode == 1
    assert "no Python 3.11" in result.stderr


@pytest.fixture
def checkout(tmp_path):
    """One whose environment counts as installed, with the system's Python."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(shutil.which("python3"))
    mark = subprocess.run(
        ["sha256sum", folder / "pyproject.toml"], capture_output=True, text=True, check=True
    )
    (folder / ".venv/.installed-serve").write_text(mark.stdout)
    return folder


def quickstart_of(checkout, port):
    return subprocess.run(
        ["bash", checkout / "launch/quickstart.sh", "--port", str(port)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(checkout / "cache")},
        timeout=60,
    )


def test_a_taken_port_is_told_so(checkout):
    """Nothing is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = quickstart_of(checkout, port)
    assert result.returncode == 1
    assert f"port {port} is in use: choose another with --port" in result.stderr


def test_a_port_that_is_taken_meanwhile_is_told_so(checkout):
    """SGLang then says so in its log and lives on."""
    programs, port = checkout / ".venv/bin", free_port()
    programs.joinpath("python").unlink()
    programs.joinpath("python").write_text(
        '#!/bin/sh\n[ "$2" = sgl_kimi_k3.demo.checkpoint ] || exec python3 "$@"\n'
    )
    said = f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {port}):"
    programs.joinpath("sgl-kimi-k3").write_text(
        f'#!/bin/sh\necho "{said} address already in use"\nexec sleep 50\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    checkout.joinpath("cache/sgl-kimi-k3").mkdir(parents=True)
    result = quickstart_of(checkout, port)
    assert result.returncode == 1
    assert f"port {port} was taken while the server started" in result.stderr


def _path_without_python(tmp_path):
    """A PATH with the tools the scripts need, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "dirname", "sed", "cut", "sha256sum", "realpath"):
        (folder / tool).symlink_to(shutil.which(tool))
    return str(folder)
