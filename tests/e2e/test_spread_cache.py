"""One KV cache spread over two ranks (DCP): what one rank alone would answer, and resume."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.prompts import words

pytestmark = pytest.mark.e2e


def chat(server):
    """Three users, four turns each, of odd and even lengths; then a burst that shares prefixes."""
    server.flush()
    told = []
    history = [words(f"spread user {user}", 101 + 37 * user) for user in range(3)]
    for turn in range(4):
        for user, prompt in enumerate(history):
            answer = server.generate(prompt, 5 + turn + user)
            told.append((answer.cached_tokens, answer.ids))
            history[user] = [*prompt, *answer.ids, *words(f"{user} again {turn}", 7 + user)]
    burst = [[*history[n % 3], *words(f"burst {n}", 3 + 2 * n)] for n in range(6)]
    with ThreadPoolExecutor(len(burst)) as clients:
        answers = clients.map(lambda prompt: server.generate(prompt, 6), burst)
    return told, [answer.ids for answer in answers]


def test_a_chat_samples_and_resumes_as_on_one_rank(spread, roomy):
    """Turns resume inside pages, which are a token of each rank."""
    told, burst = chat(spread)
    assert (told, burst) == chat(roomy)
    depths = [cached for cached, _ in told]
    assert depths[:3] == [0, 0, 0]
    assert all(depths[3:])
    assert {depth % 2 for depth in depths[3:]} == {0, 1}


def test_both_ranks_decided_the_same(spread):
    spread.generate(words("decided", 33), 3)
    spread.settle()
    spread.assert_idle_books()
    said = re.findall(r" (TP\d)\] kimi_k3 idle after (.*)", spread.read_log())
    last = dict(said)
    assert set(last) == {"TP0", "TP1"}
    assert last["TP0"] == last["TP1"]
    assert int(last["TP0"].split()[0]) > 100
