"""Reading `/metrics`: the right series, folded over ranks; `/server_info` says the same."""

import re
from importlib.util import find_spec
from pathlib import Path

from sgl_kimi_k3 import metrics
from sgl_kimi_k3.dashboard.sample import COUNTERS, GAUGES, of_metrics, of_reports


def test_every_value_is_the_one_in_the_text(recorded):
    """By a reader that shares nothing with the parser: one rank, so no folding."""
    sample = of_metrics(recorded.metrics, 1.0)
    for name, label in {**COUNTERS, **GAUGES}.items():
        lines = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", recorded.metrics, re.MULTILINE)
        assert lines, name
        told = {}
        for labels, value in lines:
            own = re.search(rf'(?:^|,){label}="([^"]*)"', labels)[1] if label else ""
            told[name, own] = told.get((name, own), 0.0) + float(value)
        read = {**sample.counters, **sample.gauges}
        assert {key: value for key, value in read.items() if key[0] == name} == told


def test_other_series_are_not_kept(recorded):
    assert "sglang:cache_hit_rate" in recorded.metrics
    sample = of_metrics(recorded.metrics, 1.0)
    assert {name for name, _ in sample.counters} == set(COUNTERS)
    assert {name for name, _ in sample.gauges} == set(GAUGES)


def test_server_info_tells_the_same_counters(recorded):
    """For a server without --enable-metrics."""
    told, other = of_metrics(recorded.metrics, 1.0), of_reports([recorded.report], 1.0)
    ours = {key: value for key, value in told.counters.items() if key[0].startswith("kimi_k3:")}
    assert other.counters == ours
    arena = {key: value for key, value in told.gauges.items() if key[0] == "kimi_k3:arena_bytes"}
    assert other.gauges == arena


def series(name, value, **labels):
    inner = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value}\n"


def test_tensor_parallel_ranks_count_once_and_data_parallel_ranks_add_up():
    """Ten prompts of 100 tokens: 1000, on two tensor-parallel ranks and on two data-parallel."""
    name = "kimi_k3:input_tokens_total"
    text = f"# TYPE {name} counter\n"
    replicas = "".join(series(name, 1000, dp_rank=0, tp_rank=rank) for rank in (0, 1))
    assert of_metrics(text + replicas, 1.0).total(name) == 1000
    shares = "".join(series(name, 500, dp_rank=rank, tp_rank=rank) for rank in (0, 1))
    assert of_metrics(text + shares, 1.0).total(name) == 1000


def test_of_replicas_the_furthest_counts():
    """One may be a scrape behind the other."""
    name = "kimi_k3:input_tokens_total"
    text = "".join(series(name, value, tp_rank=rank) for rank, value in ((0, 9), (1, 7)))
    assert of_metrics(text, 1.0).total(name) == 9


def test_what_is_read_is_what_is_published():
    ours = {name for name in (*COUNTERS, *GAUGES) if name.startswith("kimi_k3:")}
    assert ours <= metrics.METRIC_NAMES
    labels = {f"kimi_k3:{name}_total": own for name, (_, own) in metrics.COUNTERS.items()}
    labels |= {f"kimi_k3:{name}": own for name, (_, own) in metrics.GAUGES.items()}
    for name in ours:
        split = {**COUNTERS, **GAUGES}[name]
        assert split in labels[name] if split else True, name
    found = find_spec("sglang")
    collector = Path(found.origin).parent / "srt/observability/metrics_collector.py"
    source = collector.read_text("utf-8")
    for name in {*COUNTERS, *GAUGES} - ours:
        assert f'name="{name.removesuffix("_bucket")}"' in source, name
