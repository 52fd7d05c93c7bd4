"""Which attention replica serves a request."""

from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers import data_parallel_controller as stock
from sglang.srt.managers.data_parallel_controller import DataParallelController, LoadBalanceMethod

from sgl_kimi_k3 import replicas
from sgl_kimi_k3.replicas import BLOCK_TOKENS, CROWDED_REQUESTS, Replicas

IDLE = {0: 0, 1: 0}


def prompt(seed: int, blocks: float) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, int(blocks * BLOCK_TOKENS))


def test_the_turns_of_a_conversation_stay_where_its_prefix_is() -> None:
    known = Replicas()
    history = {user: prompt(user, 2.5) for user in range(6)}
    first = {user: known.choose(tokens, None, IDLE) for user, tokens in history.items()}
    assert sorted(first.values()) == [0, 0, 0, 1, 1, 1], "in turn where nothing is known"
    for turn in range(3):
        for user, before in history.items():
            history[user] = np.concatenate((before, prompt(100 * turn + user, 0.7)))
            assert known.choose(history[user], None, {0: 3, 1: 1}) == first[user]


def test_a_prefix_that_both_know_goes_to_the_emptier_one() -> None:
    known = Replicas()
    system = prompt(1, 4)
    for rank in (0, 1):
        known.send(np.concatenate((system, prompt(rank + 10, 1))), None, rank)
    for seed, requests in ((20, {0: 5, 1: 2}), (21, {0: 2, 1: 5})):
        chosen = known.choose(np.concatenate((system, prompt(seed, 1))), None, requests)
        assert requests[chosen] == 2


def test_a_crowded_replica_gets_nothing_for_its_prefixes() -> None:
    known = Replicas()
    tokens = prompt(1, 4)
    known.send(tokens, None, 0)
    assert known.choose(tokens, None, {0: CROWDED_REQUESTS - 1, 1: 0}) == 0
    assert known.choose(tokens, None, {0: CROWDED_REQUESTS, 1: 0}) == 1
    busy = Replicas()
    busy.send(tokens, None, 0)
    assert busy.choose(tokens, None, {0: 124, 1: 100}) == 0, "a quarter more is not crowded"
    assert busy.choose(tokens, None, {0: 125, 1: 100}) == 1


def test_tenants_and_replicas_that_are_gone_share_nothing() -> None:
    known = Replicas()
    tokens = prompt(1, 4)
    known.send(tokens, ("a", None), 1)
    assert known.choose(tokens, ("a", None), {0: 0, 1: 1}) == 1
    assert known.choose(tokens, ("b", None), {0: 0, 1: 1}) == 0
    assert known.choose(tokens, ("a", None), {0: 0}) == 0
    assert known.choose(tokens, ("a", None), {}) is None


def test_what_was_not_sent_for_longest_is_forgotten() -> None:
    known = Replicas(max_blocks=4)
    old, new = prompt(1, 2), prompt(2, 3)
    known.send(old, None, 1)
    known.send(new, None, 1)
    assert known.choose(old, None, {0: 0, 1: 1}) == 0, "one of its two blocks is gone"
    assert known._known(known._prefixes(new, None), 1) < 3


@pytest.fixture
def controller(monkeypatch):
    """SGLang's own routing over two replicas; `sent` is where requests went."""
    sent = []
    monkeypatch.setattr(stock, "sock_send", lambda worker, _: sent.append(worker))
    monkeypatch.setattr(
        replicas, "get_memory", lambda: SimpleNamespace(radix_cache_backend="kimi_k3")
    )
    made = DataParallelController.__new__(DataParallelController)
    made.workers, made.status, made._active_workers = [0, 1], [True, True], [0, 1]
    made.round_robin_counter = 0
    made.dp_budget = stock.DPBudget(2)
    made.load_balance_method = LoadBalanceMethod.ROUND_ROBIN
    made.refresh_load_budget = lambda: None
    return SimpleNamespace(made=made, sent=sent)


def ask(controller, tokens, rank=None):
    """Send one as SGLang does, our hook around its question for an outside choice."""
    original = DataParallelController.maybe_external_dp_rank_routing
    made = controller.made
    made.maybe_external_dp_rank_routing = lambda req: replicas.route(original, made, req)
    req = SimpleNamespace(
        input_ids=tokens.tolist(), routed_dp_rank=rank, extra_key=None, cache_salt=None
    )
    made.round_robin_scheduler(req)
    return controller.sent[-1]


def test_through_sglangs_controller(controller) -> None:
    first = ask(controller, prompt(1, 2))
    assert ask(controller, np.concatenate((prompt(1, 2), prompt(2, 1)))) == first
    assert controller.made.dp_budget.total_requests[first] == 2
    assert [ask(controller, prompt(3, 0.5)) for _ in range(4)] == [0, 1, 0, 1], "short: in turn"
    assert ask(controller, prompt(4, 3), rank=1) == 1
    assert ask(controller, prompt(4, 3)) == 1, "where a client sent it is remembered"


def test_a_method_that_was_asked_for_stands(controller) -> None:
    controller.made.load_balance_method = LoadBalanceMethod.TOTAL_REQUESTS
    assert [ask(controller, prompt(1, 2)) for _ in range(4)] == [0, 1, 0, 1]
