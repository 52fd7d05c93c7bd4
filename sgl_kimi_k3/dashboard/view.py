"""What is shown, as plain JSON: the same numbers for the page, for `top` and for scripts.

`summary` has the figures over the window and since the server's start, `curves` the lines of the
charts. Keys are documented in README.md; a figure without evidence is None, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_kimi_k3.dashboard.explain import explained
from sgl_kimi_k3.dashboard.history import quantile
from sgl_kimi_k3.dashboard.sample import arena_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sgl_kimi_k3.dashboard.history import Floats, History

SCHEMA = 1
BINS = 60  # of a chart
SHORTEST_BIN_S = 2.0
SMOOTHED = 4  # bins that a point of a line looks back on: a request or two are no rate
QUANTILES = {"p50": 0.5, "p95": 0.95}
HISTOGRAMS = {
    "ttft_s": "sglang:time_to_first_token_seconds_bucket",
    "itl_s": "sglang:inter_token_latency_seconds_bucket",
}
INERT_TOKENS = 2000  # prompt tokens after which not one reused token is worth a warning

Json = dict[str, Any]


def summary(history: History, reports: Sequence[Mapping[str, Any]], window_s: float) -> Json:
    """Figures of the last `window_s` seconds and since the server's start.

    `reports` are the `kimi_k3` blocks of `/server_info`, one per data-parallel rank; none is fine.
    """
    last = history.last
    end = last.at if last else 0.0
    start = end - window_s
    window = _tokens({name: history.growth(name, start, end) for name in _TOKENS})
    total = _tokens({name: last.split(name) if last else {} for name in _TOKENS})
    return {
        "schema": SCHEMA,
        "time": end or None,
        "window_s": window_s,
        "covered_s": round(history.covered(start, end), 3),
        "restarts_seen": history.restarts,
        "hit_rate": {"window": _hit_rate(window), "total": _hit_rate(total)},
        "tokens": {"window": window, "total": total},
        "checkpoints": _checkpoints(history, reports),
        "arena": _arena(history, reports),
        "latency": {
            name: _quantiles(history.growth(series, start, end))
            for name, series in HISTOGRAMS.items()
        },
        "load": _load(history, start, end),
        "limits": _limits(reports),
        "requests": _requests(reports),
    }


_TOKENS = {
    "kimi_k3:input_tokens_total": "input",
    "kimi_k3:matched_tokens_total": "matched",
    "kimi_k3:resumed_tokens_total": "resumed",
    "kimi_k3:lost_tokens_total": "lost",
    "kimi_k3:hit_tokens_total": "hits",
}


def _tokens(values: Mapping[str, Mapping[str, float]]) -> Json:
    found: Json = {}
    for series, name in _TOKENS.items():
        split = {label: round(value) for label, value in values[series].items()}
        found[name] = split if name in {"lost", "hits"} else split.get("", 0)
    return found


def _hit_rate(tokens: Mapping[str, Any]) -> float | None:
    """A ratio of sums: one small miss cannot pull it to zero."""
    return tokens["resumed"] / tokens["input"] if tokens["input"] else None


def _checkpoints(history: History, reports: Sequence[Mapping[str, Any]]) -> Json:
    """Counts by kind since the server's start; `held` now, if the server tells."""
    last = history.last
    found: Json = {
        name: {
            kind: round(value)
            for kind, value in (
                last.split(f"kimi_k3:checkpoints_{name}_total") if last else {}
            ).items()
        }
        for name in ("taken", "evicted", "refused")
    }
    held: dict[str, int] = {}
    for report in reports:
        for kind, count in report["checkpoints"]["held"].items():
            held[kind] = held.get(kind, 0) + count
    return {"held": held or None, **found}


def _arena(history: History, reports: Sequence[Mapping[str, Any]]) -> Json:
    """Bytes by part over all ranks, and each rank's arena in the order of its bytes."""
    gauges = history.last.gauges if history.last else {}
    parts = {part: round(v) for (name, part), v in gauges.items() if name == "kimi_k3:arena_bytes"}
    return {"bytes": parts or None, "ranks": [_picture(report) for report in reports]}


def _picture(report: Mapping[str, Any]) -> Json:
    """One arena from its first byte to its last; the lengths of `segments` add up to it.

    Cached bytes are those that eviction could free now; in use are those of running requests.
    """
    arena, units = report["arena"], {"states": "state_bytes", "kv": "block_bytes"}
    parts = arena_parts(arena)
    sides: dict[str, dict[str, int]] = {}
    for side, unit in units.items():
        told = arena[side]
        free = (told["cached"] - told["protected"]) * arena[unit]
        sides[side] = {"cached": free, "used": parts[side] - free, "holes": told["hole_bytes"]}
    states, kv = sides["states"], sides["kv"]
    segments = [
        ("sink", parts["sink"]),
        ("states_used", states["used"]),
        ("states_cached", states["cached"]),
        ("states_holes", states["holes"]),
        ("gap", parts["gap"]),
        ("kv_holes", kv["holes"]),
        ("kv_cached", kv["cached"]),
        ("kv_used", kv["used"]),
    ]
    size = arena["block_size"]
    return {
        "rank": report["rank"],
        "total_bytes": arena["total_bytes"],
        "segments": [{"part": part, "bytes": count} for part, count in segments],
        "states": {
            "live": arena["states"]["live"],
            "cached": arena["states"]["cached"],
            "more": arena["states"]["fundable"],
            "most": arena["max_states"],
            "peak_bytes": arena["states"]["peak_bytes"],
            "unit_bytes": arena["state_bytes"],
        },
        "kv_tokens": {
            "live": arena["kv"]["live"] * size,
            "cached": arena["kv"]["cached"] * size,
            "more": arena["kv"]["fundable"] * size,
            "most": arena["max_blocks"] * size,
            "peak_bytes": arena["kv"]["peak_bytes"],
            "unit_bytes": arena["block_bytes"] // size,
        },
    }


def _quantiles(buckets: Mapping[str, float]) -> Json:
    bounds, counts = list(buckets), list(buckets.values())
    return {name: quantile(bounds, counts, share) for name, share in QUANTILES.items()}


def _load(history: History, start: float, end: float) -> Json:
    """Levels now, and rates per second over the window."""
    covered = history.covered(start, end)

    def rate(name: str, label: str | None = None) -> float | None:
        grown = history.growth(name, start, end)
        if not covered or not grown:
            return None
        return (sum(grown.values()) if label is None else grown.get(label, 0.0)) / covered

    gauges = history.last.gauges if history.last else {}
    return {
        "running": gauges.get(("sglang:num_running_reqs", "")),
        "queued": gauges.get(("sglang:num_queue_reqs", "")),
        "requests_per_s": rate("sglang:num_requests_total"),
        "prompt_tokens_per_s": rate("kimi_k3:input_tokens_total"),
        "output_tokens_per_s": rate("sglang:realtime_tokens_total", "decode"),
        "retracted_requests": round(sum(_growth(history, "retracted_requests", start, end))),
        "evicted_kv_tokens": round(sum(_growth(history, "evicted_kv_tokens", start, end))),
    }


def _growth(history: History, name: str, start: float, end: float) -> list[float]:
    return list(history.growth(f"kimi_k3:{name}_total", start, end).values())


def _limits(reports: Sequence[Mapping[str, Any]]) -> Json:
    """In force, over all data-parallel ranks."""
    found: dict[str, int] = {}
    for report in reports:
        for name, limit in report["limits"].items():
            if limit["effective"] is not None:
                found[name] = found.get(name, 0) + limit["effective"]
    return found


def _requests(reports: Sequence[Mapping[str, Any]]) -> list[Json] | None:
    """The last requests, newest first, each with a sentence; None: not told."""
    if not any(report["explain"] for report in reports):
        return None
    rows = [row for report in reports for row in report["requests"]]
    rows.sort(key=lambda row: row["time"], reverse=True)
    return [{**row, "text": explained(row)} for row in rows[:50]]


def curves(history: History, window_s: float) -> Json:
    """Lines of the charts over the last `window_s` seconds; None where nothing is known.

    Bars (`tokens_per_s`) are of one bin, [time, time + bin_s); lines look back on four, so that
    their last points agree with what a reader sees happen.
    """
    bin_s = max(SHORTEST_BIN_S, window_s / BINS)
    if history.last is None:
        return {"bin_s": bin_s, "time": [], "lines": {}, "tokens_per_s": {}}
    end = history.last.at
    count = int(window_s / bin_s)
    last_start = end // bin_s * bin_s
    starts = last_start - bin_s * np.arange(count - 1, -1, -1, dtype=np.float64)
    ends = np.minimum(starts + bin_s, end)
    known = history.known(np.maximum(starts, history.first_at or 0.0)) & history.known(ends)
    known &= ends - starts > bin_s / 4
    return {
        "bin_s": bin_s,
        "time": starts.tolist(),
        "tokens_per_s": _bars(history, starts, ends, known),
        "lines": _lines(history, ends - SMOOTHED * bin_s, ends, known),
    }


def _bars(history: History, starts: Floats, ends: Floats, known: Any) -> Json:
    seconds = np.maximum(ends - starts, 1e-9)

    def rates(name: str) -> dict[str, list[float | None]]:
        before, after = history.at(name, starts), history.at(name, ends)
        return {k: _listed((after[k] - before[k]) / seconds, known) for k in after}

    resumed = rates("kimi_k3:resumed_tokens_total").get("")
    bars = {"resumed": resumed} if resumed is not None else {}
    return {**bars, **rates("kimi_k3:lost_tokens_total")}


def _lines(history: History, starts: Floats, ends: Floats, known: Any) -> Json:
    first = history.first_at or 0.0
    seconds = np.maximum(ends - np.maximum(starts, first), 1e-9)

    def grown(name: str) -> dict[str, Floats]:
        before, after = history.at(name, starts), history.at(name, ends)
        return {label: after[label] - before[label] for label in after}

    nothing = np.zeros(len(ends))
    told = {name: grown(f"kimi_k3:{name}_tokens_total") for name in ("input", "resumed", "matched")}
    tokens = {name: values.get("", nothing) for name, values in told.items()}
    asked = known & (tokens["input"] > 0)
    share = np.maximum(tokens["input"], 1e-9)
    output = grown("sglang:realtime_tokens_total").get("decode")
    lines: Json = {
        "hit_rate": _listed(tokens["resumed"] / share, asked),
        "known_rate": _listed(tokens["matched"] / share, asked),
        "running": _listed(history.level("sglang:num_running_reqs", ends), known),
        "queued": _listed(history.level("sglang:num_queue_reqs", ends), known),
        "output_tokens_per_s": None if output is None else _listed(output / seconds, known),
    }
    for name, series in HISTOGRAMS.items():
        buckets = grown(series)
        bounds = list(buckets)
        table = np.array(list(buckets.values())).reshape(len(bounds), len(ends)).T
        for label, part in QUANTILES.items():
            points = [quantile(bounds, row.tolist(), part) for row in table]
            told_at = zip(points, known, strict=True)
            lines[f"{name}_{label}"] = [p if k else None for p, k in told_at]
    return lines


def _listed(values: Floats, known: Any) -> list[float | None]:
    return [
        float(value) if ok and np.isfinite(value) else None
        for value, ok in zip(values, known, strict=True)
    ]


def notices(summary_: Mapping[str, Any]) -> list[Json]:
    """What an operator should be told without looking for it."""
    found = []
    total, window = summary_["tokens"]["total"], summary_["tokens"]["window"]
    if total["input"] >= INERT_TOKENS and not total["resumed"]:
        found.append(
            f"Nothing is being reused: not one of {total['input']:,} prompt tokens came from the "
            "cache. If prompts share beginnings, look at the reasons below."
        )
    memory = window["lost"].get("evicted", 0) + window["lost"].get("refused", 0)
    if window["input"] >= INERT_TOKENS and memory > 0.2 * window["input"]:
        found.append(
            f"Memory is short: {memory / window['input']:.0%} of the prompt tokens in this window "
            "were known, but what they need had been evicted or found no room."
        )
    if summary_["load"]["retracted_requests"]:
        found.append(
            f"{summary_['load']['retracted_requests']} running requests had to give their memory "
            "back in this window. They start over later: lower --max-running-requests."
        )
    return [{"level": "warn", "text": text} for text in found]
