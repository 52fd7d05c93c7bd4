"""What a client sees of the cache: where requests resume, who shares with whom, what is counted."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl_kimi_k3.demo.tokenizer import vocabulary
from tests.e2e.prompts import words
from tests.e2e.server import Reply, body

pytestmark = pytest.mark.e2e

GRID, TRACK = 16, 32  # of the roomy server
END_OF_MESSAGE = vocabulary().control("<|end_of_msg|>")


@pytest.fixture(autouse=True)
def _empty(roomy):
    """Memory is free when a test begins."""
    roomy.flush()


def together(server, prompts, new_tokens=4, **fields):
    """All prompts in one batch request, so that they arrive in the same scheduling pass."""
    answer = server.post("/generate", body_of_batch(prompts, new_tokens, **fields))
    assert answer.status_code == 200, answer.text
    return [Reply.of(one) for one in answer.json()]


def body_of_batch(prompts, new_tokens, **fields):
    return {**body([], new_tokens, **fields), "input_ids": [list(p) for p in prompts]}


@pytest.mark.parametrize("length", [1, 2, GRID, GRID + 1, 64, 65, 128, 129, 200])
def test_a_resent_prompt_resumes_below_its_last_token(roomy, length):
    """The last token is always computed, and no state that contains it may be restored."""
    prompt = words(f"resent {length}", length)
    first, again = roomy.generate(prompt), roomy.generate(prompt)
    alone = roomy.generate(prompt, cache_salt=f"resent {length}")
    assert first.cached_tokens == alone.cached_tokens == 0
    assert again.cached_tokens == (length - 1) // GRID * GRID
    assert again.ids == first.ids == alone.ids


def test_one_more_token_resumes_at_the_prompt_end(roomy):
    prompt = words("end", 77)
    roomy.generate(prompt)
    assert roomy.generate([*prompt, *words("one", 1)]).cached_tokens == 77


def test_every_turn_resumes_where_the_last_one_ended(roomy):
    """The state after the last computed token, which is the reply's last but one, is kept."""
    history = words("turns", 90)
    reply = roomy.generate(history, 9)
    for turn in range(3):
        ended = len(history) + len(reply.ids) - 1
        history = [*history, *reply.ids, *words(f"turn {turn}", 7)]
        reply = roomy.generate(history, 9)
        assert reply.cached_tokens == ended
    assert reply.ids == roomy.generate(history, 9, cache_salt="turns").ids


def test_a_prompt_that_parts_inside_an_answer(roomy):
    """It resumes at the last of the states that the answer left before that."""
    prompt = words("answer", 50)
    answer = roomy.generate(prompt, 60)
    parted = [*prompt, *answer.ids[:52], *words("another end", 9)]
    reply = roomy.generate(parted)
    assert reply.cached_tokens == 3 * TRACK
    assert reply.ids == roomy.generate(parted, cache_salt="answer").ids


def test_the_second_request_already_shares_a_prefix(roomy):
    """While memory is free no proof by a second sight is needed."""
    shared = words("shared", 100)
    assert roomy.generate([*shared, *words("a", 30)]).cached_tokens == 0
    second = [*shared, *words("b", 30)]
    reply = roomy.generate(second)
    assert reply.cached_tokens == 96
    assert reply.ids == roomy.generate(second, cache_salt="second").ids


def test_a_burst_computes_its_new_prefix_once(roomy):
    shared = words("burst", 160)
    prompts = [[*shared, *words(f"burst {i}", 20)] for i in range(6)]
    burst = together(roomy, prompts)
    assert [r.cached_tokens for r in burst].count(0) == 1, burst
    assert all(r.cached_tokens in (0, 160) for r in burst), burst
    again = together(roomy, prompts)
    assert all(r.cached_tokens >= 160 for r in again), again
    assert [r.ids for r in again] == [r.ids for r in burst]


def test_parallel_samples_share_their_prompt(roomy):
    prompt = words("samples", 70)
    wanted = body(prompt, 4)
    wanted["sampling_params"]["n"] = 3
    answer = roomy.post("/generate", wanted)
    assert answer.status_code == 200, answer.text
    replies = [Reply.of(one) for one in answer.json()]
    assert len(replies) == 3
    assert len({r.ids for r in replies}) == 1
    assert min(r.cached_tokens for r in replies) >= 64


def test_input_logprobs_do_not_depend_on_the_cache(roomy):
    """A request that wants logprobs of cached tokens computes them again, cut or not."""
    prompt = words("logprobs", 100)
    roomy.generate(prompt)

    def logprobs(start, **fields):
        asked = body(prompt, 1, return_logprob=True, logprob_start_len=start, **fields)
        answer = roomy.post("/generate", asked)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        return meta["cached_tokens"], [value for value, *_ in meta["input_token_logprobs"]]

    for start in (0, 50):
        cached, found = logprobs(start)
        assert cached <= start
        _, alone = logprobs(start, cache_salt=f"logprobs {start}")
        assert len(found) == len(alone) == 100 - start
        assert found[1:] == pytest.approx(alone[1:], abs=1e-3)


CONTEXTS = (
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"extra_key": "a"},
    {"extra_key": "a", "cache_salt": "a"},
)


def ask_generate(server, context):
    return server.generate(words("isolation", 80), **context).cached_tokens


def ask_completions(server, context):
    wanted = {"model": "default", "prompt": words("completions", 80), "max_tokens": 4}
    answer = server.post("/v1/completions", {**wanted, "temperature": 0, **context})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_chat(server, context):
    messages = [{"role": "user", "content": " the quiet river and the old stone bridge" * 4}]
    return server.chat(messages, **context)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("ask", [ask_generate, ask_completions, ask_chat])
def test_tenants_share_nothing(roomy, ask):
    assert [ask(roomy, context) for context in CONTEXTS] == [0] * len(CONTEXTS)
    assert all(ask(roomy, context) >= GRID for context in CONTEXTS)


def test_tenants_in_one_batch_share_nothing(roomy):
    prompt = words("batch of tenants", 80)
    for expected in ({0}, {64}):
        replies = together(roomy, [prompt] * 3, cache_salt=["x", "y", "z"])
        assert {r.cached_tokens for r in replies} == expected


def test_chat_turns_and_a_second_user_resume(roomy):
    """Over the OpenAI endpoint: the next turn at the last one's end, another user at the system's.

    The system message ends off the grid, where only the rule of message boundaries keeps a state.
    """
    system = {"role": "system", "content": " keep every answer short and kind" * 11}

    def turn(*messages):
        answer = roomy.chat([system, *messages], return_input_ids_in_sglext=True)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        # `usage` leaves the opening of the reply out of the prompt.
        return answer["choices"][0]["message"], answer["sglext"]["input_ids"], cached

    question = {"role": "user", "content": " where does the river go"}
    reply, prompt, cached = turn(question)
    assert cached == 0
    thought = reply.get("reasoning_content") or reply["content"]
    spoken = {"role": "assistant", "content": "", "reasoning_content": thought}
    *_, cached = turn(question, spoken, {"role": "user", "content": " and then"})
    assert cached == len(prompt) + 8 - 1

    ends = [i + 1 for i, token in enumerate(prompt) if token == END_OF_MESSAGE]
    *_, cached = turn({"role": "user", "content": " who built this"})
    assert cached == ends[1]  # behind the thinking effort and the system message
    assert cached % GRID
    assert roomy.metrics()['kimi_k3:hit_tokens_total{kind="boundary"}'] == cached


def test_flush_gives_everything_back(roomy):
    prompt = words("flushed", 90)
    roomy.generate(prompt)
    assert roomy.settle()["kimi_k3:cached_states"] > 0
    roomy.flush()
    empty = roomy.metrics()
    for name in ("live_states", "live_blocks", "cached_states", "cached_blocks", "ghost_tokens"):
        assert empty[f"kimi_k3:{name}"] == 0, name
    for part in ("states", "state_holes", "kv", "kv_holes"):
        assert empty[f'kimi_k3:arena_bytes{{part="{part}"}}'] == 0, part
    assert roomy.generate(prompt).cached_tokens == 0


def test_gauges_are_of_the_idle_moment(roomy):
    """Also after a request whose own copy of a block gave way to the tree's."""
    prompt = words("gauges", 70)
    assert roomy.generate(prompt, 12).ids == roomy.generate(prompt, 12).ids
    roomy.assert_idle_books()


def test_requests_are_counted_once(roomy):
    """Chunks, bursts and resumes: the counters are the sums of what the clients were told."""
    shared = words("counted", 150)
    before = roomy.settle()
    replies = [roomy.generate(shared[:length]) for length in (150, 150, 40, 1)]
    replies += together(roomy, [[*shared, *words(f"counted {i}", 9)] for i in range(5)])
    replies += together(roomy, [words(f"uncounted {i}", 70) for i in range(5)])
    after = roomy.settle()
    told = sum(r.prompt_tokens for r in replies)
    cached = sum(r.cached_tokens for r in replies)
    assert after.since(before, "kimi_k3:input_tokens_total") == told
    assert after.since(before, "kimi_k3:resumed_tokens_total") == cached
    assert after.since(before, "kimi_k3:lost_tokens_total") == told - cached
    assert after.since(before, "kimi_k3:hit_tokens_total") == cached
    assert after.since(before, "sglang:prompt_tokens_total") == told
    assert after.since(before, "sglang:cached_tokens_total") == cached
    assert cached <= after.since(before, "kimi_k3:matched_tokens_total") <= told


def test_the_live_report_is_what_the_metrics_say(roomy):
    """`/server_info`, which needs no metrics, and `/metrics`: one truth."""
    prompt = words("reported", 90)
    for _ in range(2):
        roomy.generate(prompt)
    seen = roomy.assert_idle_books()
    (report,) = [state["kimi_k3"] for state in roomy.info()["internal_states"]]
    assert report["tokens"]["input"] == seen["kimi_k3:input_tokens_total"]
    assert report["tokens"]["resumed"] == seen["kimi_k3:resumed_tokens_total"]
    for reason, tokens in report["tokens"]["lost"].items():
        assert tokens == seen[f'kimi_k3:lost_tokens_total{{reason="{reason}"}}']
    assert sum(report["checkpoints"]["held"].values()) == seen["kimi_k3:cached_states"]
    arena = report["arena"]
    parts = sum(arena[f"{part}_bytes"] for part in ("gap", "sink", "slack"))
    for end in (arena["states"], arena["kv"]):
        parts += end["live_bytes"] + end["retired_bytes"] + end["hole_bytes"]
    assert parts == arena["total_bytes"] == roomy.arena_bytes()
    assert report["limits"]["running_requests"] == {"asked": 16, "effective": 16}


def test_a_request_longer_than_the_pool_is_refused(tight):
    capacity = tight.info()["max_total_num_tokens"]
    answer = tight.post("/generate", body(words("too long", capacity), 4))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert str(capacity) in message
    assert "exceeds" in message
    assert tight.generate(words("short", 20)).finish == "length"
    tight.assert_healthy()


def test_the_longest_request_that_is_not_refused_finishes(tight):
    """Admitted means finished: whatever it asks for is cut to what the pool can hold."""
    longest = tight.info()["max_total_num_tokens"] - 8
    reply = tight.generate(words("longest", longest), 100_000)
    assert reply.finish == "length"
    assert 1 <= len(reply.ids) < 16
    tight.assert_idle_books()


def test_requests_queue_when_the_pool_is_full(tight):
    """Far more than fits, all at once: everyone is served, with the tokens it gets alone."""
    prompts = [words(f"queued {i}", 330 + 10 * i) for i in range(12)]
    before = tight.settle()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda prompt: tight.generate(prompt, 12), prompts))
    assert all(r.finish == "length" and len(r.ids) == 12 for r in replies), replies
    after = tight.settle()  # those that had to wait, or to start again, count once
    assert after.since(before, "kimi_k3:requests_total") == 12
    assert after.since(before, "kimi_k3:input_tokens_total") == sum(map(len, prompts))
    for prompt, reply in zip(prompts[::4], replies[::4], strict=True):
        alone = tight.generate(prompt, 12, cache_salt="alone")
        assert alone.ids == reply.ids
    tight.assert_idle_books()
