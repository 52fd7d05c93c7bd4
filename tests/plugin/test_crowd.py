"""The model of an overloaded server: right times, same figures twice, no gate with room."""

from __future__ import annotations

import pytest

from tests.bench.crowd import Costs, Crowd, figures
from tests.bench.load import Turn
from tests.plugin.fake_device import fake_device

pytestmark = pytest.mark.usefixtures("device")
TURNS, NEW, ANSWER = 4, 400, 30


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch):
        yield


def sessions(count: int) -> list[list[Turn]]:
    """Nothing shared between them."""
    return [
        [Turn([100_000 * s + 1000 * t + i for i in range(NEW)], ANSWER + t) for t in range(TURNS)]
        for s in range(1, count + 1)
    ]


def play(clients: int, *, states: int = 100, tokens: int = 200_000, **options) -> dict:
    longest = TURNS * 2 * NEW
    return figures(
        Crowd(
            sessions(24), clients, states=states, tokens=tokens, longest=longest, **options
        ).play()
    )


def test_one_turn_takes_what_its_passes_cost():
    costs, prompt, answer = Costs(), 9000, 50
    crowd = Crowd([[Turn(list(range(prompt)), answer)]], 1).play()
    arrival = costs.client + prompt * costs.client_token
    prefill = 2 * costs.prefill + prompt * costs.prefill_token  # 8,192 tokens, then the rest
    step = costs.decode + costs.decode_request
    (seen,) = crowd.seen.values()
    assert seen.ttft == pytest.approx(arrival + prefill)
    # The first token is the prefill's; one step more is launched before the end is known.
    assert crowd.now == pytest.approx(arrival + prefill + (answer - 1 + 1) * step)


def test_the_same_figures_twice():
    tight = {"tokens": 4000, "states": 4, "overtake": 16}
    assert play(8, **tight) == play(8, **tight)


def test_with_room_the_gate_changes_nothing():
    without = play(8)
    assert play(8, overtake=16) == without
    resumed = sum(sum(NEW + ANSWER + t for t in range(turn)) for turn in range(TURNS))
    prompts = resumed + TURNS * NEW
    assert without["token_hit_rate"] == pytest.approx(resumed / prompts, abs=0.01)


@pytest.mark.parametrize("policy", ["fcfs", "hrrn", "lpm"])
def test_many_steps_at_once_are_the_steps_one_by_one(monkeypatch, policy):
    tight = {"tokens": 4000, "states": 4, "overtake": 16, "policy": policy}
    at_once = play(6, **tight)
    monkeypatch.setattr(Crowd, "_uneventful", lambda *_: 1)
    one_by_one = play(6, **tight)
    for name in ("seconds", "output_tokens_per_s", "ttft_s"):  # sums of floats in another order
        assert at_once.pop(name) == pytest.approx(one_by_one.pop(name))
    assert at_once == one_by_one
