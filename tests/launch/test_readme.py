"""What the README says about commands, options and files is so."""

import re
from dataclasses import fields
from pathlib import Path

from sgl_kimi_k3.config import Options

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_options_table_is_the_options():
    rows = re.findall(r"^\| `(--kimi-k3-\S+)` \| `(KIMI_K3_\w+)` \| (\S+) \|", README, re.MULTILINE)
    told = {name: (flag, default) for flag, name, default in rows}
    assert told == {
        f"KIMI_K3_{field.name.upper()}": (
            f"--kimi-k3-{field.name.replace('_', '-')}",
            shown(field.default),
        )
        for field in fields(Options)
    }


def shown(default):
    if isinstance(default, bool):
        return str(int(default))
    return str(default) or "-"


def test_every_file_named_exists():
    named = re.findall(r"`((?:launch|tests)/[\w./]+)`", README) + re.findall(
        r"\]\((?!https?:)([^)#]+)\)", README
    )
    named += re.findall(r"^bash (\S+)", README, re.MULTILINE)
    assert len(named) >= 6
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


def test_quickstart_options_are_told():
    help_lines = re.findall(
        r"^# (--[a-z]+)", (ROOT / "launch/quickstart.sh").read_text("utf-8"), re.MULTILINE
    )
    assert help_lines
    assert all(f"`{option}" in README for option in help_lines)
