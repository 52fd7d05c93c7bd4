"""Greedy tokens and resumed depths do not depend on drafts (`--speculative-algorithm NGRAM`).

The reference is `roomy`, which has no drafts and is else the same.  What was generated once is
drafted right the second time, so that whole windows are accepted; the first time hardly any is.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.prompts import words
from tests.e2e.server import Reply, body

pytestmark = pytest.mark.e2e

NEW_TOKENS = 17  # no multiple of a window


@pytest.fixture(autouse=True, scope="module")
def _empty(roomy, drafting):
    """Memory is free when the tests begin."""
    roomy.flush()
    drafting.flush()


def ask(server, prompt, new_tokens=NEW_TOKENS, **fields):
    """The reply, and how many windows it took; 0 without drafts."""
    answer = server.post("/generate", body(prompt, new_tokens, **fields))
    assert answer.status_code == 200, answer.text
    return Reply.of(answer.json()), answer.json()["meta_info"].get("spec_verify_ct", 0)


def talk(server, name, length):
    """Three turns of a conversation: (tokens, cached tokens) of each, and all windows."""
    history, said, windows = words(name, length), [], 0
    for turn in range(3):
        reply, took = ask(server, history)
        said.append((reply.ids, reply.cached_tokens))
        windows += took
        history = [*history, *reply.ids, *words(f"{name} {turn}", 7)]
    return said, windows


@pytest.mark.parametrize("length", [1, 33, 64, 90])
def test_conversations_are_those_without_drafts(roomy, drafting, length):
    name = f"drafts {length}"
    first, unknown = talk(drafting, name, length)
    assert first == talk(roomy, name, length)[0]
    again, known = talk(drafting, name, length)
    assert again == talk(roomy, name, length)[0]
    # The first token is the prefill's; of the others up to 6 come of a window.
    assert known < unknown <= 3 * (NEW_TOKENS - 1)
    assert known >= 3 * 3


def test_a_busy_server_says_the_same(roomy, drafting):
    """Twelve at a time with shared prefixes, a fifth aborted, all retracted now and then."""
    draw = random.Random(3)
    stems = [words(f"busy {n}", 40 + 11 * n) for n in range(3)]
    prompts = [[*stems[n % 3], *words(f"leaf {n}", 5 + n)] for n in range(9)]
    truth = [ask(roomy, prompt, 24)[0].ids for prompt in prompts]
    before = drafting.settle()

    def one(number):
        which, rid = draw.randrange(9), f"busy-{number:03}"
        if number % 5 == 4:
            threading.Timer(draw.uniform(0.05, 1.0), drafting.abort, (rid,)).start()
        reply, _ = ask(drafting, prompts[which], 24, rid=rid)
        assert reply.ids == truth[which][: len(reply.ids)], (number, which, reply)
        assert len(reply.ids) == 24 or reply.finish == "abort"

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(60)))
    after = drafting.assert_idle_books()
    assert after.since(before, "kimi_k3:retracted_requests_total") > 0
    assert after.since(before, 'kimi_k3:checkpoints_taken_total{kind="retract"}') > 0
    assert after.since(before, "kimi_k3:resumed_tokens_total") > 0


def test_output_logprobs_are_those_without_drafts(roomy, drafting):
    def logprobs(server):
        wanted = body(words("logprobs", 50), 12, return_logprob=True)
        found = server.post("/generate", wanted).json()["meta_info"]["output_token_logprobs"]
        return [one[0] for one in found], [one[1] for one in found]

    values, tokens = logprobs(drafting)
    expected, same = logprobs(roomy)
    assert tokens == same
    assert values == pytest.approx(expected, abs=1e-5)


def test_sampled_tokens_are_as_many_as_asked_for(drafting):
    """Drafts are accepted with the probability the model gives them, under any filter."""
    for filters in ({}, {"top_p": 0.5}, {"top_k": 3}):
        wanted = body(words("sampled", 30), 12)
        wanted["sampling_params"] |= {"temperature": 1.0, **filters}
        reply = Reply.of(drafting.post("/generate", wanted).json())
        assert (len(reply.ids), reply.finish) == (12, "length")
