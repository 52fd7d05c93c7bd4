"""One reading of a server: the series of `/metrics` that are shown, folded over ranks.

Tensor- and pipeline-parallel ranks keep the same tree, so of them the largest value counts; data-
parallel ranks serve different requests and are added up. A series is known by its name and, where
it is split, the value of the one label that is shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Key = tuple[str, str]  # name, value of the shown label ("" if it is not split)

OURS, SGLANG = "kimi_k3:", "sglang:"

# name -> the label it is split by
COUNTERS: dict[str, str] = {
    "kimi_k3:input_tokens_total": "",
    "kimi_k3:matched_tokens_total": "",
    "kimi_k3:resumed_tokens_total": "",
    "kimi_k3:lost_tokens_total": "reason",
    "kimi_k3:hit_tokens_total": "kind",
    "kimi_k3:checkpoints_taken_total": "kind",
    "kimi_k3:checkpoints_refused_total": "kind",
    "kimi_k3:checkpoints_evicted_total": "kind",
    "kimi_k3:evicted_kv_tokens_total": "",
    "kimi_k3:retracted_requests_total": "",
    "sglang:realtime_tokens_total": "mode",
    "sglang:num_requests_total": "",
    "sglang:time_to_first_token_seconds_bucket": "le",
    "sglang:inter_token_latency_seconds_bucket": "le",
}
GAUGES: dict[str, str] = {
    "kimi_k3:arena_bytes": "part",
    "sglang:num_running_reqs": "",
    "sglang:num_queue_reqs": "",
}
_SPLIT = {**COUNTERS, **GAUGES}
_REPLICAS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank", "pid"})
# Everything else is dropped before parsing: SGLang has some 600 samples that nobody looks at here.
_FAMILIES = sorted({re.sub(r"_(total|bucket)$", "", name) for name in _SPLIT})
_WANTED = re.compile(rf"^(?:# (?:TYPE|HELP) )?(?:{'|'.join(_FAMILIES)})(?:_total|_bucket)?[{{ ]")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server said at one moment.

    Attributes:
        at: seconds since 1970, by the clock of whoever asked.
        counters: running totals since the server started.
        gauges: levels.
    """

    at: float
    counters: Mapping[Key, float]
    gauges: Mapping[Key, float]

    def total(self, name: str) -> float:
        """A counter over all values of its label; 0 if the server has no such series."""
        return sum(value for key, value in self.counters.items() if key[0] == name)

    def split(self, name: str) -> dict[str, float]:
        """A counter by the value of its label."""
        return {key[1]: value for key, value in self.counters.items() if key[0] == name}


def of_metrics(text: str, at: float) -> Sample:
    """Read the Prometheus text of `/metrics`; ValueError if it is none."""
    kept = "\n".join(line for line in text.splitlines() if _WANTED.match(line))
    ranks: dict[Key, dict[tuple[str, ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(kept + "\n"):
        for sample in family.samples:
            if sample.name not in _SPLIT:
                continue
            key = (sample.name, sample.labels.get(_SPLIT[sample.name], ""))
            rest = sorted(item for item in sample.labels.items() if item[0] not in _REPLICAS)
            which = tuple(f"{name}={value}" for name, value in rest)
            ranks[key][which] = max(sample.value, ranks[key].get(which, 0.0))
    folded = {key: sum(values.values()) for key, values in ranks.items()}
    return Sample(
        at,
        {key: value for key, value in folded.items() if key[0] in COUNTERS},
        {key: value for key, value in folded.items() if key[0] in GAUGES},
    )


def of_reports(reports: Sequence[Mapping[str, Any]], at: float) -> Sample:
    """The same cache series from `/server_info`, for a server without `--enable-metrics`.

    `reports` are the `kimi_k3` blocks of its internal states, one per data-parallel rank.
    """
    counters: dict[Key, float] = defaultdict(float)
    gauges: dict[Key, float] = defaultdict(float)
    for report in reports:
        for key, value in _counters_of(report):
            counters[key] += value
        for part, size in arena_parts(report["arena"]).items():
            gauges["kimi_k3:arena_bytes", part] += size
    return Sample(at, dict(counters), dict(gauges))


def _counters_of(report: Mapping[str, Any]) -> Iterator[tuple[Key, float]]:
    tokens, checkpoints = report["tokens"], report["checkpoints"]
    for name in ("input", "matched", "resumed"):
        yield (f"kimi_k3:{name}_tokens_total", ""), tokens[name]
    for reason, value in tokens["lost"].items():
        yield ("kimi_k3:lost_tokens_total", reason), value
    for kind, value in report["hits"].items():
        yield ("kimi_k3:hit_tokens_total", kind), value
    for kind, value in checkpoints["taken"].items():
        yield ("kimi_k3:checkpoints_taken_total", kind), value
    for name in ("refused", "evicted"):
        for by_kind in checkpoints[name].values():
            for kind, value in by_kind.items():
                yield (f"kimi_k3:checkpoints_{name}_total", kind), value
    yield ("kimi_k3:evicted_kv_tokens_total", ""), sum(report["evicted_kv_tokens"].values())
    yield ("kimi_k3:retracted_requests_total", ""), report["retracted_requests"]


def arena_parts(arena: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by part, as `kimi_k3:arena_bytes` has them; they add up to the arena."""
    states, kv = arena["states"], arena["kv"]
    return {
        "states": states["live_bytes"] + states["retired_bytes"],
        "state_holes": states["hole_bytes"],
        "kv": kv["live_bytes"] + kv["retired_bytes"],
        "kv_holes": kv["hole_bytes"],
        "gap": arena["gap_bytes"],
        "sink": arena["sink_bytes"] + arena["slack_bytes"],
    }
