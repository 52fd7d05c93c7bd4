"""The peers on sequences whose hits and victims follow by hand from what their papers say."""

import numpy as np
import pytest

from radix.sim.peers import lru, marconi, vllm
from radix.sim.peers.marconi import FlopAware, best_alpha
from tests.sim.sequences import Prompts, serve, setup

ROOMY = 100_000


@pytest.fixture
def prompts():
    return Prompts()


def test_lru_keeps_the_prompts_end_and_the_turns(prompts):
    server = lru.make(setup(ROOMY, state_tokens=10))
    first = prompts.request(prompts.new(50), output=21)
    turn = prompts.request(first.ids, prompts.new(5))
    edited = prompts.request(first.ids[:50], prompts.new(5))
    shares = prompts.request(first.ids[:40], prompts.new(5))
    again = prompts.request(shares.ids[:45], prompts.new(5))
    # The answer's last token has no KV: the turn ends at 70. Where prompts part there is no state.
    assert serve(server, first, turn, edited, shares, again) == [0, 70, 50, 0, 45]


def test_lru_drops_the_least_recently_consumed(prompts):
    # Each leaves a state of 10 at its prompt's end, which is the turn's end too, and 50 tokens.
    one, two, three = (prompts.request(prompts.new(50)) for _ in range(3))
    longer = {r: prompts.request(r.ids[:50], prompts.new(1)) for r in (one, two, three)}
    # The sink, two of them and what runs; the third needs room for 50 + 2 states.
    server = lru.make(setup(10 + 2 * 60 + 75, state_tokens=10))
    assert serve(server, one, two, longer[one], three, longer[one], longer[two]) == [
        0,
        0,
        50,
        0,
        50,
        0,
    ]


def test_marconi_resumes_shared_input_from_its_third_sight(prompts):
    server = marconi.make(setup(ROOMY, state_tokens=10))
    shared = prompts.new(19)
    ones = [prompts.request(shared, prompts.new(5), output=3) for _ in range(3)]
    assert serve(server, *ones) == [0, 0, 19]
    counters = server.counters()
    assert (counters["taken_junction"], counters["taken_turn_end"]) == (1, 3)


def test_marconi_keeps_the_last_decoded_token_not_the_prompts_end(prompts):
    server = marconi.make(setup(ROOMY, state_tokens=10))
    first = prompts.request(prompts.new(50), output=21)
    turn = prompts.request(first.ids, prompts.new(5))
    edited = prompts.request(first.ids[:50], prompts.new(5))
    assert serve(server, first, turn, edited) == [0, 70, 0]
    assert serve(server, prompts.request(first.ids[:50], prompts.new(5))) == [50]


@pytest.mark.parametrize(
    ("alpha", "victim_len"), [(0.0, 400), (0.8, 400), (0.9, 100), (1.1, 100), (1.3, 40)]
)
def test_marconi_weighs_recency_against_flops_per_byte(prompts, alpha, victim_len):
    """Three leaves, oldest first, of 400, 100 and 40 tokens with a state of 100 each.

    Recency is scaled 0, 0.5, 1. Efficiency is 400/500, 100/200, 40/140: scaled 1, 5/12, 0. They
    score alpha, 1/2 + alpha 5/12, and 1: the first is lowest below 6/7, the last above 6/5.
    """
    policy = FlopAware(setup(ROOMY, state_tokens=100).model.costs, alpha)
    server = lru.plain(setup(ROOMY, state_tokens=100), policy, marconi.KINDS)
    ones = [prompts.request(prompts.new(tokens)) for tokens in (400, 100, 40)]
    serve(server, *ones)
    assert policy.victim(server.cache.held.tick).depth == victim_len


def test_marconi_never_drops_a_node_that_two_need(prompts):
    given = setup(ROOMY, state_tokens=10)
    policy = FlopAware(given.model.costs, 0.0)
    server = lru.plain(given, policy, marconi.KINDS)
    shared = prompts.new(30)
    serve(server, *(prompts.request(shared, prompts.new(5)) for _ in range(2)))
    depths = []
    while (victim := policy.victim(server.cache.held.tick)) is not None:
        depths.append(victim.depth)
        held = server.cache.states
        server.cache.evict(server.pool.fundable_states() + 1, 0)
        assert server.cache.states == held - 1
    # The junction is the older of the two states made last, but has two children until one went.
    assert depths == [35, 30, 35]


def test_marconi_gives_up_a_branch_between_running_requests_last(prompts):
    given = setup(ROOMY, state_tokens=10)
    server = lru.plain(given, FlopAware(given.model.costs, 0.0), marconi.KINDS)
    shared = prompts.new(30)
    ones = [prompts.request(shared, prompts.new(5)) for _ in range(2)]
    serve(server, *ones)
    for one in ones:  # both resume at their ends, whose KV they protect from then on
        assert server.begin(prompts.request(one.ids[:35], prompts.new(5))) == 35
    assert server.cache.evict(server.pool.fundable_states() + 3, 0)
    assert server.cache.states == 0


def test_marconi_alpha_is_what_would_have_saved_most(prompts):
    """A long session idles while one-shots pass: recency alone loses it, FLOPs per byte keep it."""
    session = prompts.request(prompts.new(200))
    given = setup(10 + 210 + 150, state_tokens=10)
    sequence = [session]
    for _ in range(4):
        sequence += [prompts.request(prompts.new(20)) for _ in range(8)]
        sequence.append(prompts.request(session.ids[:200], prompts.new(3)))
    assert best_alpha(given, sequence) > 0
    assert best_alpha(given, sequence[:2]) == 0, "no difference: recency alone"


def test_marconi_tunes_once_after_the_first_eviction(prompts):
    server = marconi.make(setup(10 + 210 + 150, state_tokens=10))
    session = prompts.request(prompts.new(200))
    serve(server, session)
    for _ in range(100):
        serve(server, *(prompts.request(prompts.new(20)) for _ in range(8)))
        serve(server, prompts.request(session.ids[:200], prompts.new(3)))
        if server.tuned:
            break
    assert server.tuned
    assert server.counters()["alpha_percent"] == round(100 * server.policy.alpha) > 0


def test_vllm_states_stand_at_block_ends(prompts):
    server = vllm.make(setup(ROOMY, state_tokens=300))
    first = prompts.request(prompts.new(300), output=101)
    turn = prompts.request(first.ids, prompts.new(60))
    # A state stands at 256 of 300. The answer's KV is cached up to 384: the turn parts there.
    assert serve(server, first, turn) == [0, 256]
    assert serve(server, prompts.request(first.ids, prompts.new(60))) == [384]
    exact = prompts.request(first.ids[:256])
    assert serve(server, exact) == [0], "the last token is computed, and no state stands at 128"
    assert serve(server, exact) == [128]


def test_vllm_second_sight_of_a_shared_prefix(prompts):
    server = vllm.make(setup(ROOMY, state_tokens=300))
    shared = prompts.new(300)
    ones = [prompts.request(shared, prompts.new(400)) for _ in range(3)]
    assert serve(server, *ones) == [0, 0, 256]
    assert server.counters()["taken_shared"] == 1
    assert server.counters()["taken_replay"] == 3


def test_vllm_evicts_in_the_order_of_letting_go(prompts):
    # A request of 257 tokens holds 3 blocks and 2 states of 128 each and leaves 2 blocks and one.
    one, two, three = (prompts.request(prompts.new(257)) for _ in range(3))
    server = vllm.make(setup(128 * (1 + 3 + 3 + 4), state_tokens=128))
    assert serve(server, one, two) == [0, 0]
    assert server.counters()["evicted_blocks"] == 0
    # Four units are free, five are needed: the first's deepest block goes, and with it its hit.
    assert serve(server, three) == [0]
    assert server.counters()["evicted_blocks"] == 1
    assert serve(server, two) == [256]
    assert serve(server, one) == [0]


def test_vllm_refuses_what_cannot_fit_and_changes_nothing(prompts):
    server = vllm.make(setup(128 * 8, state_tokens=128))
    one = prompts.request(prompts.new(257))
    assert serve(server, one, prompts.request(prompts.new(1000)), one) == [0, None, 256]


@pytest.mark.parametrize("make", [lru.make, marconi.make, vllm.make])
def test_everything_comes_back(prompts, make):
    """After many requests under pressure, the pool holds exactly what is cached."""
    server = make(setup(5_000, state_tokens=128))
    rng = np.random.default_rng(1)
    past = [prompts.new(200)]
    for _ in range(200):
        base = past[int(rng.integers(len(past)))]
        one = prompts.request(base[: int(rng.integers(1, 900))], prompts.new(150), output=40)
        resumed = serve(server, one)
        assert resumed == [None] or resumed[0] < one.prompt_len
        past.append(one.ids)
    inner = getattr(server, "server", server)
    assert inner.pool.violations() == []
    if make is vllm.make:
        held = (int((units.key_of >= 0).sum()) for units in (server.states, server.blocks))
        assert (inner.pool.live_states, inner.pool.live_blocks) == tuple(held)
        assert server.states.idle == inner.pool.live_states
    else:
        assert inner.cache.violations() == []
        assert (inner.pool.live_states, inner.pool.live_blocks) == (
            inner.cache.states,
            inner.cache.blocks,
        )
