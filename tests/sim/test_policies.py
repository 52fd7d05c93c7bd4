"""The yardsticks in worlds small enough to count by hand."""

import numpy as np
import pytest

from radix import Costs, Kind
from radix.sim import policies
from radix.sim.engine import Engine
from radix.sim.model import Model
from radix.sim.policies.orders import _KINDS, Lhd
from radix.sim.server import Setup
from radix.sim.trace import Request, Trace

STATE, TOKEN = 10, 1
MODEL = Model("small", STATE, TOKEN, 1.0, 0.0)


def trace_of(*prompts):
    """One prompt a minute, answers of one token; equal numbers are equal tokens."""
    requests = [
        Request(n, n * 60_000_000, None, len(ids), 1, (), np.array([*ids, 900 + n]), 1)
        for n, ids in enumerate(prompts)
    ]
    return Trace("small", tuple(requests), 1000)


def resumed(name, trace, capacity):
    """What each request resumed."""
    setup = Setup(MODEL, capacity, trace, block_size=1, interval=0, grid=1, opportunistic=0)
    found = []
    server = policies.make(name, setup)
    Engine(trace, server, MODEL, on_request=lambda _, n: found.append(n)).run()
    return found


A, B, C = [*range(100, 130)], [*range(200, 230)], [*range(300, 330)]
SHARED = trace_of([*A, 1], [*A, 2], [*A, 3], B, [*A, 1, 4])


def test_unbounded_resumes_all_that_is_shared():
    assert resumed("unbounded", SHARED, 200) == [0, 30, 30, 0, 31]


def test_clairvoyant_leaves_a_state_before_anyone_asks():
    """The first prompt already stops at 30, where the second will part; ours at the second."""
    assert resumed("clairvoyant", SHARED, 1000) == [0, 30, 30, 0, 31]
    assert resumed("ours", SHARED, 1000) == [0, 0, 30, 0, 31]


@pytest.mark.parametrize(("name", "hits"), [("clairvoyant", [0, 0, 0, 30]), ("lru", [0, 0, 0, 0])])
def test_clairvoyant_keeps_what_comes_back(name, hits):
    """Room for two prompts with their states; A comes back, and was used longest ago."""
    assert resumed(name, trace_of(A, B, C, [*A, 1]), 115) == hits


@pytest.mark.parametrize(("name", "last"), [("consumed-lru", 0), ("gdsf", 30)])
def test_a_use_outweighs_youth_where_uses_count(name, last):
    """A was used once, B is younger, C needs the room of one."""
    order = [A, [*A, 1], B, C, [*A, 1, 2]]
    assert resumed(name, trace_of(*order), 115) == [0, 30, 0, 0, last]


def test_hit_density_is_uses_by_ticks_of_those_that_get_there():
    order = Lhd(Costs())
    used, idle = order._uses, order._ends
    used[_KINDS[Kind.TURN_END], 3] = 50
    idle[_KINDS[Kind.PROMPT_END], 5] = 50
    order._learn()
    assert order._rate[_KINDS[Kind.TURN_END], :4].tolist() == [1 / 4, 1 / 3, 1 / 2, 1]
    assert order._rate[_KINDS[Kind.PROMPT_END], :6].tolist() == [0] * 6
    assert used.max() == pytest.approx(45), "what was long ago counts less"
