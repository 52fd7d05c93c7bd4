"""Recording and alert rules: what promtool finds, and that they ask for series that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sgl_kimi_k3.metrics import METRIC_NAMES

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "launch/rules/kimi_k3.yml"
(GROUP,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
RECORDED = {rule["record"] for rule in GROUP["rules"] if "record" in rule}
ALERTS = {rule["alert"] for rule in GROUP["rules"] if "alert" in rule}


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is missing: apt install prometheus (tests/run.sh does)")
    return subprocess.run(
        ["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "launch/prometheus.yml"),
        ("check", "rules", "launch/rules/kimi_k3.yml"),
        ("test", "rules", "launch/rules/kimi_k3_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool(arguments):
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_series_exists():
    for rule in GROUP["rules"]:
        for name in set(re.findall(r"kimi_k3:[\w:]+", rule["expr"])):
            assert name in METRIC_NAMES | RECORDED, rule


def test_every_alert_is_unit_tested():
    text = (ROOT / "launch/rules/kimi_k3_test.yml").read_text("utf-8")
    assert set(re.findall(r"alertname: (\w+)", text)) == ALERTS
