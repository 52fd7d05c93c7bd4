"""`sgl-kimi-k3 top` and `dashboard`: arguments, JSON for scripts, text for people."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from sgl_kimi_k3 import cli
from sgl_kimi_k3.dashboard import command
from sgl_kimi_k3.dashboard.terminal import screen
from tests.dashboard.serving import serving

README = Path(command.__file__).with_name("README.md")


@contextlib.contextmanager
def recorded_server(recorded):
    routes = [
        Route("/metrics", lambda _: PlainTextResponse(recorded.metrics)),
        Route("/server_info", lambda _: JSONResponse(recorded.info)),
    ]
    with serving(Starlette(routes=routes)) as url:
        yield url


def flattened(value, path=""):
    """Every key, dotted; of a list, of its first item."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flattened(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        yield from flattened(value[0], f"{path}[]")
    else:
        yield path


def test_once_as_json_is_for_scripts(recorded, capsys):
    with recorded_server(recorded) as url:
        assert cli.main(["top", "--server", url, "--once", "--json", "--interval", "0.2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"]["total"]["input"] == recorded.report["tokens"]["input"]
    assert found["schema"] == 1


def test_every_key_is_documented(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    recorded.poll(watcher)
    table = README.read_text("utf-8").split("## JSON")[1]
    documented = {
        key
        for cell in re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
        for key in re.findall(r"`([^`]+)`", cell)
    }
    by_name = r"lost|hits|held|taken|evicted|refused|arena\.bytes"  # by reason, kind or part
    free = re.compile(rf"({by_name})\.\w+$")
    used = {free.sub(r"\1", key) for key in flattened(watcher.summary(60))}
    assert used == documented


def test_text_shows_the_figures(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    recorded.count("input_tokens_total", recorded.report["tokens"]["input"] + 1000)
    recorded.count("resumed_tokens_total", recorded.report["tokens"]["resumed"] + 905)
    recorded.poll(watcher)
    text = shown(watcher.summary(60), recorded.now + 3)
    assert "live 3 s ago" in text
    assert re.search(r"^90\.5% ", text, re.MULTILINE)
    assert re.search(r"Resumed +905 +90\.5% +27,872", text)
    assert re.search(r"Turn end +\d+ +\d+", text)
    assert "Memory 16.1 MiB" in text
    assert "tokens resumed from" in text
    assert max(map(len, text.splitlines())) <= 80


def shown(view, now, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(screen(view, now=now))
    return console.export_text()


def test_a_server_that_is_away_is_said(capsys):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert cli.main(["top", "--server", f"127.0.0.1:{port}", "--once", "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["status"]["state"] == "unreachable"
    assert told.err == (
        f"sgl-kimi-k3: Server not reachable at http://127.0.0.1:{port}: connection refused.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top", "--json"], "--json needs --once"),
        (["top", "--interval", "0"], "--interval 0: must be 0.2 to 60 seconds"),
        (["top", "--window", "nan"], "--window nan: must be 1 to 3600 seconds"),
        (["top", "--server", "ftp://x"], "--server ftp://x: must be a URL"),
        (["dashboard", "--port", "70000"], "--port 70000: must be 0 to 65535"),
        (["dashboard", "--interval", "nan"], "--interval nan: must be"),
        (["dashboard", "--server", "http://"], "--server http://: must be a URL"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, message, capsys):
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_taken_port_is_told_so(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["dashboard", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; choose another" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["dashboard --port 0", "top"])
def test_ctrl_c_is_how_it_ends(command):
    # A shell starts what runs behind it with Ctrl-C ignored, and this test may run behind one.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from sgl_kimi_k3 import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", code, *command.split(), "--server", "127.0.0.1:1"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        line = process.stdout.readline().decode()
        if page := re.search(r"http://\S+:\d+(?=  )", line):
            assert requests.get(page[0], timeout=60).status_code == 200
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert (process.returncode, told) == (0, b"")


def test_what_is_missing_is_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "rich" else object())
    assert cli.main(["dashboard"]) == 2
    told = "rich not installed: run  pip install 'sgl-kimi-k3[watch]'"
    assert told in capsys.readouterr().err
