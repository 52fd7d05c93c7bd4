"""Exact counters of a tiny trace: what any change of policy shows."""

import json

import pytest

from tests.golden.replay import CAPACITIES, COUNTERS, replay


@pytest.fixture(scope="module")
def golden():
    return json.loads(COUNTERS.read_text("utf-8"))


@pytest.mark.parametrize("blocks", CAPACITIES)
def test_counters(golden, blocks):
    found = replay(blocks)
    assert found == golden[str(blocks)], "intended? `python -m tests.golden` rewrites them"


def test_tokens_add_up(golden):
    """What was not resumed is lost for a reason, and every hit has a kind."""
    for counters in golden.values():
        resumed = counters["resumed_tokens"]
        assert resumed + sum(counters["lost_tokens"].values()) == counters["input_tokens"]
        assert sum(counters["hit_tokens"].values()) == resumed
        kept = sum(counters["taken"].values()) - sum(counters["evicted"].values())
        assert kept == counters["states"]


def test_more_memory_resumes_more(golden):
    resumed = [golden[str(blocks)]["resumed_tokens"] for blocks in CAPACITIES]
    assert resumed == sorted(resumed)
    assert golden[str(CAPACITIES[-1])]["evicted"] == {}
    assert golden[str(CAPACITIES[0])]["lost_tokens"]["evicted"] > 0
