"""Figures and curves: exact, complete, None where nothing is known."""

import json

import pytest

from radix import Kind, Loss
from sgl_kimi_k3.dashboard import names, terminal
from sgl_kimi_k3.dashboard.app import page
from sgl_kimi_k3.dashboard.explain import KINDS, LOSSES, explained
from sgl_kimi_k3.dashboard.view import curves

INPUT, RESUMED = 32406, 26967  # of the recording


def test_figures_of_a_recorded_server(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    found = watcher.summary(300)
    total = found["tokens"]["total"]
    assert (total["input"], total["resumed"]) == (INPUT, RESUMED)
    assert total["resumed"] + sum(total["lost"].values()) == total["input"]
    assert sum(total["hits"].values()) == total["resumed"]
    assert found["hit_rate"] == {"window": None, "total": pytest.approx(RESUMED / INPUT)}
    held, taken = found["checkpoints"]["held"], found["checkpoints"]["taken"]
    evicted = found["checkpoints"]["evicted"]
    assert all(held[kind] == taken[kind] - evicted[kind] for kind in held)
    assert found["latency"]["ttft_s"] == {"p50": None, "p95": None}  # nothing in the window yet
    assert found["load"]["running"] == 0
    json.dumps(found, allow_nan=False)


def test_growth_in_the_window(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    recorded.count("input_tokens_total", INPUT + 1000)
    recorded.count("resumed_tokens_total", RESUMED + 900)
    recorded.poll(watcher, after=10)
    recorded.count("input_tokens_total", INPUT + 1090)
    recorded.poll(watcher, after=10)
    found = watcher.summary(300)
    assert found["hit_rate"]["window"] == pytest.approx(900 / 1090)
    assert found["load"]["prompt_tokens_per_s"] == pytest.approx(1090 / 20)
    assert found["covered_s"] == 20
    assert watcher.summary(10)["hit_rate"]["window"] == 0  # only the misses are so recent


def test_the_picture_of_the_arena_has_every_byte(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    arena = watcher.summary(60)["arena"]
    (one,) = arena["ranks"]
    assert sum(part["bytes"] for part in one["segments"]) == one["total_bytes"] == 16911360
    size = {part["part"]: part["bytes"] for part in one["segments"]}
    told = recorded.report["arena"]
    assert size["states_used"] + size["states_cached"] == arena["bytes"]["states"]
    assert size["kv_used"] + size["kv_cached"] == arena["bytes"]["kv"]
    evictable = told["states"]["cached"] - told["states"]["protected"]
    assert size["states_cached"] == evictable * told["state_bytes"]
    assert [part["part"] for part in one["segments"]][1] == "states_used"  # from the left
    assert [part["part"] for part in one["segments"]][-1] == "kv_used"  # from the right


def test_requests_are_newest_first_and_explained(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    rows = watcher.summary(60)["requests"]
    times = [row["time"] for row in rows]
    assert times == sorted(times, reverse=True)
    assert all(row["text"].startswith(f"{row['resumed']:,} of ") for row in rows if row["resumed"])
    recorded.report["explain"] = False
    recorded.poll(watcher)
    assert watcher.summary(60)["requests"] is None


def test_a_request_that_found_nothing_is_explained():
    row = {"prompt_tokens": 1500, "resumed": 0, "kind": None, "lost": {"new": 1400, "refused": 100}}
    assert explained(row) == (
        "None of 1,500 tokens resumed; 1,400 were new; "
        "100 were known, but there had been no memory to keep a state."
    )


def test_data_parallel_ranks_are_shown_apart_and_counted_together(recorded):
    second = json.loads(json.dumps(recorded.report))
    second["rank"]["dp"] = 1
    recorded.info["internal_states"].append({"kimi_k3": second})
    watcher = recorded.watcher()
    recorded.poll(watcher)
    found = watcher.summary(60)
    assert [one["rank"]["dp"] for one in found["arena"]["ranks"]] == [0, 1]
    one = recorded.report["checkpoints"]["held"]
    assert found["checkpoints"]["held"] == {kind: 2 * count for kind, count in one.items()}
    assert found["limits"]["running_requests"] == 32


def test_bars_add_up_to_the_growth(recorded):
    watcher = recorded.watcher()
    grown = 0
    for step in range(31):
        recorded.count("resumed_tokens_total", RESUMED + grown)
        recorded.poll(watcher, after=2.0)
        grown += 10 * step
    found = curves(watcher.history, 60)
    bars = found["tokens_per_s"]["resumed"]
    end = watcher.history.last.at
    seconds = [min(start + found["bin_s"], end) - start for start in found["time"]]
    total = sum(bar * length for bar, length in zip(bars, seconds, strict=True) if bar is not None)
    first = found["time"][0]
    assert total == pytest.approx(sum(watcher.history.growth(
        "kimi_k3:resumed_tokens_total", first, end).values()))  # fmt: skip
    assert all(len(line) == len(found["time"]) for line in found["lines"].values() if line)
    json.dumps(found, allow_nan=False)


def test_lines_are_interrupted_where_the_server_was_away(recorded):
    watcher = recorded.watcher()
    for _ in range(5):
        recorded.poll(watcher)
    away = recorded.now
    recorded.poll(watcher, after=40.0)
    for _ in range(5):
        recorded.poll(watcher)
    found = curves(watcher.history, 60)
    told = dict(zip(found["time"], found["lines"]["running"], strict=True))
    during = [value for at, value in told.items() if away + 4 < at < away + 36]
    assert during
    assert not any(value is not None for value in during)
    assert told[max(told) - 4] == 0


def test_nothing_known_is_nothing_drawn(recorded):
    watcher = recorded.watcher()
    assert curves(watcher.history, 300)["time"] == []
    assert watcher.summary(300)["time"] is None


@pytest.mark.parametrize(
    ("lost", "retracted", "word"),
    [
        ({"evicted": 9000}, 0, "Memory is short: 90%"),
        ({"refused": 3000}, 0, "Memory is short: 30%"),
        ({}, 3, "3 running requests"),
    ],
)
def test_what_is_bad_is_said(recorded, lost, retracted, word):
    watcher = recorded.watcher()
    recorded.metrics = None  # from /server_info, where it is easy to change
    recorded.poll(watcher)
    recorded.report["tokens"]["input"] += 10_000
    for reason, tokens in lost.items():
        recorded.report["tokens"]["lost"][reason] += tokens
    recorded.report["retracted_requests"] += retracted
    recorded.poll(watcher)
    (notice,) = watcher.summary(60)["notices"]
    assert notice["text"].startswith(word)


def test_a_cache_that_reuses_nothing_is_said(recorded):
    watcher = recorded.watcher()
    recorded.count("resumed_tokens_total", 0)
    recorded.poll(watcher)
    (notice,) = watcher.summary(60)["notices"]
    assert "not one of 32,406 prompt tokens" in notice["text"]


def test_everything_that_is_counted_has_a_name_a_meaning_and_a_colour():
    reasons, kinds = {loss.value for loss in Loss}, {kind.value for kind in Kind}
    assert set(names.PARTS) == {"resumed", *reasons}
    assert set(LOSSES) == reasons
    assert set(names.KINDS) == set(KINDS) == kinds
    assert list(terminal.COLOURS) == list(names.PARTS)
    text = page()
    assert all(f"--{part}: light-dark(" in text for part in names.PARTS)
    assert all(name in text and tip in text for name, tip in names.PARTS.values())
