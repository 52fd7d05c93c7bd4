"""docs/operating.md names what exists: every series, label value, alert, option and field."""

import re
from dataclasses import fields
from pathlib import Path

import yaml

from radix import Cause, Kind, Loss
from sgl_kimi_k3 import metrics
from sgl_kimi_k3.config import Options
from sgl_kimi_k3.explain import REMEMBERED, Explanation
from sgl_kimi_k3.observer import PUBLISH_EVERY_S
from tests.plugin.test_life import prompt
from tests.plugin.world import World

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs/operating.md").read_text("utf-8")
RULES = yaml.safe_load((ROOT / "launch/rules/kimi_k3.yml").read_text("utf-8"))["groups"][0]["rules"]


def section(title):
    return re.search(rf"^#+ {title}\n(.*?)(?=^#+ |\Z)", DOC, re.MULTILINE | re.DOTALL)[1]


def first_column(text):
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def code_in(text):
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_series_is_told_and_no_other():
    told = first_column(section("Every series"))
    counters = [f"{name}_total" for name in metrics.COUNTERS]
    assert sorted(told) == sorted([*counters, *metrics.GAUGES, *metrics.HISTOGRAMS])


def test_every_label_is_told():
    rows = [line for line in section("Every series").splitlines() if line.startswith("| `")]
    told = {tuple(first_column(row)): tuple(code_in(row.split("|")[2])) for row in rows}
    known = metrics.COUNTERS | metrics.GAUGES
    for names, labels in told.items():
        for name in names:
            own = known.get(name.removesuffix("_total"), ("", ()))[1]
            assert set(labels) == set(own), name
    assert {kind.value for kind in Kind} <= code_in(DOC)
    assert {cause.value for cause in Cause} <= code_in(section("Every series"))


def test_every_reason_is_told():
    assert first_column(section("Lost tokens")) == [
        loss
        for loss in ("new", "diverged", "no_checkpoint", "evicted", "refused", "too_short")
        if loss in {reason.value for reason in Loss}
    ]
    assert len(first_column(section("Lost tokens"))) == len(Loss)


def test_every_alert_and_record_is_told():
    assert first_column(section("Alerts")) == [r["alert"] for r in RULES if "alert" in r]
    assert {r["record"] for r in RULES if "record" in r} <= code_in(section("Alerts"))


def test_every_field_of_the_live_report_is_told():
    from sglang.srt.runtime_context import get_parallel

    from sgl_kimi_k3.live import live_report

    world = World(explain=True)
    world.serve(prompt(1, 20))
    with get_parallel().override(tp_rank=0, attn_dp_rank=0, pp_rank=0):
        report = live_report(world.tree)
    told = code_in(section("The live report"))
    words = {word for name in told for word in re.split(r"[.,\s]+", name)}
    missing = set(report) - words
    missing |= set(report["arena"]) - words
    missing |= set(report["arena"]["kv"]) - words
    missing |= {*report["limits"], *report["checkpoints"], *report["tokens"]} - words
    missing |= {field.name for field in fields(Explanation)} - words
    assert not missing
    assert set(report["policy"]) <= code_in(section("Policy"))
    assert f"last {REMEMBERED} requests" in DOC


def test_options_and_files_named_exist():
    options = {f"KIMI_K3_{field.name.upper()}" for field in fields(Options)}
    named = set(re.findall(r"KIMI_K3_[A-Z_]+", DOC)) - {"KIMI_K3_DASHBOARDS"}
    assert named <= options
    files = set(re.findall(r"(?<![\w/])launch/[\w./]+\.(?:py|json|yml)", DOC))
    assert len(files) >= 4
    assert all((ROOT / name).exists() for name in files)
    assert f"at most every {PUBLISH_EVERY_S} s" in DOC
