"""Who runs when, against a policy that only writes down what it is asked."""

from pathlib import Path

import numpy as np
import pytest

from radix.sim.engine import Engine, Rates
from radix.sim.model import load
from radix.sim.trace import Request, Trace


def request(number, at_ms, prompt, output, session=None):
    ids = np.arange(1000 * number, 1000 * number + prompt + output, dtype=np.int64)
    return Request(number, at_ms * 1000, session, prompt, output, (), ids, 1)


class Scripted:
    """Admits `room` requests at a time; resumes half of each prompt."""

    name = "scripted"

    def __init__(self, room=100, refuses=()):
        self.room = room
        self.refuses = refuses
        self.running = 0
        self.log = []

    def begin(self, one):
        if self.running == self.room or one.number in self.refuses:
            return None
        self.running += 1
        self.log.append(("begin", one.number))
        return one.prompt_len // 2

    def extend(self, one, up_to):
        self.log.append((one.number, up_to))
        return True

    def finish(self, one):
        self.running -= 1
        self.log.append(("finish", one.number))

    def counters(self):
        return {}


def replay(server, *requests):
    trace = Trace("test", requests, 10**6)
    return Engine(trace, server, load("k3-tp8"), Rates(prefill=1000, decode=10)).run()


def test_chunks_then_the_answer():
    server = Scripted()
    totals = replay(server, request(0, 0, 20_000, 5))
    chunks = [(0, 18_192), (0, 20_000), (0, 20_004)]
    assert server.log == [("begin", 0), *chunks, ("finish", 0)]
    assert (totals.requests, totals.input_tokens, totals.resumed_tokens) == (1, 20_000, 10_000)
    assert totals.token_hit_rate == 0.5
    assert 0.4 < totals.saved_flops_share < 0.5, "attention makes the second half dearer"


def test_a_session_waits_for_its_turn_and_others_do_not():
    """0 prefills 500 tokens for 0.5 s and decodes 10 for 1 s; 1 is its next turn, 2 is not."""
    server = Scripted()
    replay(server, request(0, 0, 1000, 10, "a"), request(1, 100, 10, 1, "a"),
           request(2, 200, 10, 1))  # fmt: skip
    order = [one for one in server.log if one[0] in {"begin", "finish"}]
    assert order == [("begin", 0), ("begin", 2), ("finish", 2), ("finish", 0), ("begin", 1),
                     ("finish", 1)]  # fmt: skip


def test_no_room_queues_in_order_and_what_never_fits_is_refused():
    server = Scripted(room=1, refuses={1})
    totals = replay(server, *(request(n, n, 100, 1) for n in range(4)))
    assert [one[1] for one in server.log if one[0] == "begin"] == [0, 2, 3]
    assert (totals.requests, totals.refused, totals.queued) == (4, 1, 3)
    assert totals.input_tokens == 400, "a refused request computed everything elsewhere"
    assert totals.resumed_tokens == 150


def test_out_of_memory_cuts_short():
    server = Scripted()
    server.extend = lambda _, up_to: up_to < 10_000
    totals = replay(server, request(0, 0, 20_000, 5))
    assert server.log == [("begin", 0), ("finish", 0)]
    assert totals.cut_short == 1


@pytest.mark.parametrize("rate", ["prefill", "decode"])
def test_rates_are_positive(rate):
    with pytest.raises(ValueError, match="at least 1"):
        Rates(**{rate: 0})


def test_k3_weighs_what_its_config_says():
    """Design.md section 2; k3_model.md section 1: about 104.2 B active parameters."""
    for tp, state in ((1, 449_372_160), (8, 56_171_520), (16, 28_085_760)):
        model = load(f"k3-tp{tp}")
        assert (model.state_bytes, model.token_bytes) == (state, 27_648)
        assert round(model.token_flops / 2e9, 1) == 104.2
    assert model.pair_flops == 24 * 96 * 2 * (128 + 64 + 128)


@pytest.mark.parametrize("text", ["k3", "nowhere.json", "k3-tp7"])
def test_other_geometries_are_refused(text):
    with pytest.raises(ValueError, match=r"--geometry|--tp-size 7"):
        load(text)


def test_a_config_without_kda_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 1}')
    with pytest.raises(ValueError, match="no 'linear_attn_config'"):
        load(str(Path(path)))
