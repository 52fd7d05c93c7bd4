"""docs/tuning.md: options exist, defaults are the code's, files are there."""

import argparse
import re
from dataclasses import fields
from pathlib import Path

from sgl_kimi_k3.config import Options
from sgl_kimi_k3.plan import command
from tests.launch.test_readme import shown

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/tuning.md").read_text("utf-8")


def test_the_options_table_has_the_defaults_of_the_code():
    rows = dict(re.findall(r"^\| `--kimi-k3-([a-z-]+)` \| (\S+) \|", TEXT, re.MULTILINE))
    defaults = {field.name.replace("_", "-"): shown(field.default) for field in fields(Options)}
    assert rows
    assert rows == {name: defaults[name] for name in rows}
    assert set(rows) == {
        "interval",
        "opportunistic",
        "probation",
        "grid",
        "ghost-tokens",
        "overtake",
        "boundaries",
    }


def test_every_flag_named_exists():
    from sglang.srt.server_args import ServerArgs

    known = {f"--kimi-k3-{field.name.replace('_', '-')}" for field in fields(Options)}
    sglang, plan = argparse.ArgumentParser(), argparse.ArgumentParser()
    ServerArgs.add_cli_args(sglang)
    command.configure(plan)
    for parser in (sglang, plan):
        known |= set(parser._option_string_actions)
    for command_line in ("radix/sim/__main__.py", "tests/bench/crowd.py"):
        text = (ROOT / command_line).read_text("utf-8")
        known |= set(re.findall(r'"(--[a-z-]+)"', text))
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", TEXT))
    assert len(named) > 15
    assert named <= known, named - known


def test_every_file_named_exists():
    named = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert any(name.endswith(".png") for name in named)
    assert all((ROOT / "docs" / name).exists() for name in named)
    assert (ROOT / "launch/kimi_k3.config.json").exists()
