"""Two schedulers under DP attention: own caches, one forward, equal answers."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.prompts import words
from tests.e2e.server import body

pytestmark = pytest.mark.e2e


def replica(server, rank):
    """The live report of one."""
    reports = [state["kimi_k3"] for state in server.info()["internal_states"]]
    (found,) = [report for report in reports if report["rank"]["dp"] == rank]
    return found


def test_each_replica_has_a_cache_of_its_own(apart):
    """The other one joins every forward idle, and learns nothing from it."""
    apart.flush()
    before = [replica(apart, rank)["tokens"]["input"] for rank in (0, 1)]
    prompt = words("of its own", 200)
    answers = [apart.generate(prompt, routed_dp_rank=rank) for rank in (0, 0, 1, 1)]
    assert [answer.cached_tokens for answer in answers] == [0, 192, 0, 192]
    assert len({answer.ids for answer in answers}) == 1
    assert [replica(apart, rank)["tokens"]["input"] for rank in (0, 1)] == [
        tokens + 400 for tokens in before
    ]


def test_busy_and_idle_replicas_answer_as_one_alone(apart):
    """Batches differ in size and mode between the two, and one request is aborted."""
    shared = words("pressed", 70)
    prompts = [shared + words(f"pressed {n}", 5 + 9 * n) for n in range(6)]

    def ask(number):
        fields = {"routed_dp_rank": int(number % 3 == 2), "rid": f"pressed-{number}"}
        return apart.post("/generate", body(prompts[number], 6 + number, **fields)).json()

    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = [clients.submit(ask, number) for number in range(len(prompts))]
        apart.abort("pressed-3")
        told = [answer.result() for answer in answers]
    for number, (prompt, answer) in enumerate(zip(prompts, told, strict=True)):
        if answer["meta_info"]["finish_reason"]["type"] == "length":
            fields = {"cache_salt": "alone", "routed_dp_rank": 1}
            alone = apart.generate(prompt, 6 + number, **fields)
            assert tuple(answer["output_ids"]) == alone.ids, number
    assert sum(answer["meta_info"]["finish_reason"]["type"] == "length" for answer in told) >= 5


def test_conversations_stay_on_their_replica_unasked(apart):
    """SGLang deals out in turn: four conversations in turn would meet another's cache."""
    apart.flush()
    history = [words(f"user {user}", 260) for user in range(3)]
    cached = []
    for turn in range(3):
        for user, prompt in enumerate(history):
            answer = apart.generate(prompt, 2)
            cached.append(answer.cached_tokens)
            history[user] = [*prompt, *answer.ids, *words(f"user {user} again {turn}", 10)]
    assert cached[:3] == [0, 0, 0]
    assert cached[3:] == [261] * 3 + [273] * 3, "each turn resumes at the end of the one before"
    assert all(replica(apart, rank)["tokens"]["resumed"] > 0 for rank in (0, 1))


def test_metrics_tell_replicas_apart_and_add_up(apart):
    apart.assert_idle_books()  # gauges and arenas of both, summed
    text = apart.get("/metrics").text
    counted = dict(re.findall(r'kimi_k3:requests_total\{.*?dp_rank="(\d)".*?\} (\S+)', text))
    assert {int(rank): float(count) for rank, count in counted.items()} == {
        rank: replica(apart, rank)["requests_counted"] for rank in (0, 1)
    }
    assert {line[:5] for line in re.findall(r"(DP\d TP\d)\] kimi_k3 idle", apart.read_log())} == {
        "DP0 T", "DP1 T",
    }  # fmt: skip


def test_the_plan_is_what_each_replica_reports(apart):
    """`--max-mamba-cache-size` is shared among replicas, `--max-total-tokens` is each one's."""
    one, two = (replica(apart, rank)["arena"] for rank in (0, 1))
    assert one["total_bytes"] == two["total_bytes"]
    state, token = one["state_bytes"], one["block_bytes"]
    assert one["total_bytes"] == 16 * state + 1500 * token
    assert re.search(r"; longest single request ([\d,]+) tokens", apart.read_log())
