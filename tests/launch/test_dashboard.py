"""Each panel asks for series and labels that exist, in a way that gives the right number."""

import json
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from sgl_kimi_k3 import metrics

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
sys.path.insert(0, str(LAUNCH / "dashboards"))

import kimi_k3 as code  # noqa: E402  # a script, in no package

DASHBOARD = json.loads((LAUNCH / "dashboards/kimi_k3.json").read_text("utf-8"))
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
QUERIES = [
    (panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]
]
LABELS = {
    **{f"kimi_k3:{name}_total": labels for name, (_, labels) in metrics.COUNTERS.items()},
    **{f"kimi_k3:{name}": labels for name, (_, labels) in metrics.GAUGES.items()},
    **{f"kimi_k3:{name}_bucket": ("le",) for name in metrics.HISTOGRAMS},
}


@pytest.fixture(scope="module")
def sglang_names():
    from sglang.srt.observability import metrics_collector

    source = Path(metrics_collector.__file__).read_text("utf-8")
    return set(re.findall(r'name="(sglang:\w+)"', source))


def series(expr):
    return set(re.findall(r"(?:kimi_k3|sglang):\w+", expr))


@pytest.mark.parametrize(("title", "expr"), QUERIES)
def test_every_series_exists(title, expr, sglang_names):
    names = series(expr)
    assert names, f"{title} asks for nothing"
    for name in names:
        if name.startswith("kimi_k3:"):
            assert name in metrics.METRIC_NAMES, f"{title}: {name}"
        else:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert base in sglang_names, f"{title}: {name}"


@pytest.mark.parametrize(("title", "expr"), QUERIES)
def test_every_label_grouped_by_exists(title, expr):
    for group in re.findall(r"(?:sum|max) by \(([^)]*)\)", expr):
        for label in group.split(", "):
            assert label == "le" or any(label in LABELS.get(name, ()) for name in series(expr)), (
                f"{title}: no series of {expr} has the label {label}"
            )


@pytest.mark.parametrize(("title", "expr"), QUERIES)
def test_counters_are_rated_and_gauges_are_not(title, expr):
    for name in series(expr):
        counter = name.endswith(("_total", "_bucket"))
        rated = f'rate({name}{{instance=~"$instance"}}[$window])' in expr
        assert rated == counter, f"{title}: {expr}"


@pytest.mark.parametrize(("title", "expr"), QUERIES)
def test_tensor_parallel_ranks_count_once(title, expr):
    """Every TP rank keeps the same tree, so a plain sum would multiply by their number."""
    for name in series(expr):
        if name.startswith("kimi_k3:"):
            assert re.search(rf"max without \(tp_rank\) \((rate\()?{name}\b", expr), title


def test_the_hit_rate_is_a_ratio_of_sums_of_rates():
    """A gauge of the last batch would read 0 after one miss of ten tokens (cases: 900/1090)."""
    for title in ("Token hit rate", "Token hit rate over the window"):
        assert PANELS[title]["targets"][0]["expr"] == (
            'sum(max without (tp_rank) (rate(kimi_k3:resumed_tokens_total{instance=~"$instance"}'
            "[$window]))) / sum(max without (tp_rank) "
            '(rate(kimi_k3:input_tokens_total{instance=~"$instance"}[$window])))'
        )
    assert "cache_hit_rate" not in json.dumps(DASHBOARD)


def test_parts_that_add_up_are_stacked():
    for title in ("Bytes of the arena", "Lost tokens by reason", "Hit tokens by checkpoint kind"):
        custom = PANELS[title]["fieldConfig"]["defaults"]["custom"]
        assert custom["stacking"]["mode"] == "normal"


def test_what_an_operator_asks_for_is_there():
    shown = {name for _, expr in QUERIES for name in series(expr)}
    assert {
        "kimi_k3:available_states",
        "kimi_k3:eviction_age_seconds_bucket",
        "kimi_k3:hit_age_seconds_bucket",
        "kimi_k3:limits",
        "kimi_k3:lost_tokens_total",
        "kimi_k3:moved_bytes_total",
        "kimi_k3:peak_bytes",
        "kimi_k3:policy",
        "kimi_k3:hit_tokens_total",
        "kimi_k3:arena_bytes",
        "kimi_k3:checkpoints_taken_total",
        "kimi_k3:checkpoints_refused_total",
        "kimi_k3:checkpoints_evicted_total",
        "kimi_k3:evicted_kv_tokens_total",
        "kimi_k3:retracted_requests_total",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:time_to_first_token_seconds_bucket",
    } <= shown


def test_panels_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for a, b in combinations([panel["gridPos"] for panel in DASHBOARD["panels"]], 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)
        assert a["x"] + a["w"] <= 24


def test_the_committed_file_is_what_the_code_makes():
    assert code.FILE.read_text("utf-8") == code.text(), "run python launch/dashboards/kimi_k3.py"


def test_grafana_finds_source_and_dashboard():
    provisioning = LAUNCH / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text("utf-8"))[
        "datasources"
    ]
    (variable,) = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource"]
    assert source["type"] == variable["query"] == "prometheus"
    (provider,) = yaml.safe_load((provisioning / "dashboards/kimi_k3.yml").read_text("utf-8"))[
        "providers"
    ]
    assert provider["options"] == {"path": "$KIMI_K3_DASHBOARDS"}


def test_prometheus_scrapes_the_port_quickstart_uses():
    config = yaml.safe_load((LAUNCH / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    port = re.search(r"^port=(\d+)", (LAUNCH / "quickstart.sh").read_text("utf-8"), re.MULTILINE)
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{port[1]}"]
    assert job["metrics_path"].rstrip("/") == "/metrics"
