"""The check of answers on a GPU can fail: `tests.bench.agree` beside servers that are wrong."""

import random
import zlib
from http.client import RemoteDisconnected

import pytest
import torch

from tests.bench import agree, serve, soak, weights

NOISE = 0.01


class Fake:
    """Scores are a hash of the prompt, or of what a wrong server takes for it, and some noise."""

    def __init__(self, wrong=lambda prompt: prompt) -> None:
        self.wrong = wrong
        self.noise = random.Random(1)

    def ask(self, _prompt, new=1):
        return {"output_ids": list(range(20, 20 + new))}

    def scores(self, prompt, *, cached):
        seen = self.wrong(prompt) if cached else prompt
        drawn = random.Random(zlib.crc32(repr(seen).encode()))
        scores = [drawn.gauss(-10, 1) + self.noise.gauss(0, NOISE) for _ in agree.ASKED]
        return scores, len(prompt) - 1 if cached else 0


def test_what_kernels_round_is_no_fault() -> None:
    found = agree.compare(Fake(), Fake())
    assert set(found["agree"].values()) == {agree.PROMPTS}
    assert found["apart"]["another server"]["most"] < 3 * NOISE
    assert len(found["resumed"]["answer"]) == agree.PROMPTS


@pytest.mark.parametrize(
    "wrong",
    [
        lambda prompt: prompt[1:],
        lambda prompt: prompt[-5:],
        lambda prompt: prompt if 7 in prompt else 0,
    ],
    ids=["a token lost", "another state", "one state for all"],
)
def test_a_wrong_state_is_found(wrong) -> None:
    assert min(agree.compare(Fake(wrong), None)["agree"].values()) < agree.PROMPTS


def test_another_servers_answers_are_judged() -> None:
    found = agree.compare(Fake(), Fake(lambda prompt: prompt[1:]), seed=1)
    assert found["agree"]["another server"] == agree.PROMPTS, "they are computed whole"
    wrong = Fake()
    wrong.scores = lambda prompt, **_: Fake().scores(prompt[1:], cached=False)
    assert agree.compare(Fake(), wrong)["agree"]["another server"] < agree.PROMPTS


def test_weights_that_cannot_be_heard_tell_nothing() -> None:
    """SGLang's own: the answer depends on the last token, and another prefix moves it by 1e-4."""
    quiet = Fake()
    quiet.scores = lambda prompt, cached: (
        [1e-4 * score for score in Fake().scores(prompt, cached=False)[0]],
        64 if cached else 0,
    )
    with pytest.raises(AssertionError, match="bench_weights"):
        agree.compare(quiet, None)


def test_a_cache_that_never_hits_is_found() -> None:
    server = Fake()
    server.scores = lambda prompt, **_: (Fake().scores(prompt, cached=False)[0], 0)
    with pytest.raises(AssertionError, match="nothing resumed"):
        agree.compare(server, None)


def test_an_uncached_answer_must_not_be_cached() -> None:
    server = Fake()
    server.scores = lambda *_, **__: ([0.0], 64)
    with pytest.raises(AssertionError, match="resumed 64 tokens"):
        agree.compare(server, None)


def test_layers_are_as_loud_as_what_they_are_added_to() -> None:
    """A matrix keeps the variance of its input; a state remembers forty tokens and more."""
    assert weights.spread("model.layers.0.mlp.up_proj.weight", (64, 300)) == (0.0, 0.1)
    assert weights.spread("model.layers.0.input_layernorm.weight", (64,)) == (1.0, 0.2)
    assert weights.spread("model.layers.0.self_attn.dt_bias", (64,)) == (weights.DECAY_BIAS, 0.5)
    assert weights.spread("model.layers.0.self_attn.A_log", (1, 1, 8, 1)) == (0.0, 0.1)
    assert weights.spread("model.embed_tokens.weight", (512, 64)) == (0.0, 1.0)


def test_rounding_chooses_no_expert() -> None:
    """Biases of the router lie further apart than any two sigmoids."""
    model = torch.nn.Module()
    model.gate = torch.nn.Module()
    model.gate.e_score_correction_bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    with torch.no_grad():
        weights.initialize(lambda *_: None, model)
    biases = model.gate.e_score_correction_bias.float()
    assert biases.sort().values.diff().min() >= 1
    assert biases.tolist() != sorted(biases.tolist())


def test_a_benchmark_ends_badly_where_answers_differ_or_nothing_was_told() -> None:
    good = agree.compare(Fake(), None)
    assert serve.agreed(good)
    assert not serve.agreed(agree.compare(Fake(lambda prompt: prompt[1:]), None))
    assert not serve.agreed({"failed": "nothing resumed (middle): [0]"})
    assert not serve.agreed(None)
    for shared, right in (
        (None, True),  # not asked
        ({"outputs_apart": 0.0}, True),
        ({"outputs_apart": 3 * NOISE}, True),
        ({"outputs_apart": 1.0}, False),
        ({"failed": "a prompt of its own key resumed 64"}, False),
    ):
        asked = {} if shared is None else {"ours": shared}
        assert serve.right("ours", {"agree": {"ours": good}, "shared_prefix": asked}) is right
    assert not serve.right("ours", {"agree": {}, "shared_prefix": {}})


def test_what_could_not_be_told_is_a_failure_and_ends_nothing() -> None:
    """A load's figures are kept; what is wrong with the check itself is not swallowed."""
    assert "no request was served" in agree.told(lambda: soak.compare("unused", [], 1))["failed"]
    for error in (RemoteDisconnected("gone"), ConnectionRefusedError(111, "refused")):

        def dies(error: Exception = error) -> dict:
            raise error

        assert not serve.agreed(agree.told(dies))
    with pytest.raises(ZeroDivisionError):
        agree.told(lambda: {"agree": 1 // 0})


def test_where_two_answers_part_both_tokens_are_scored() -> None:
    """Behind what they share, computed whole, so that a wrong state cannot excuse itself."""
    asked = []

    class Server(Fake):
        def scores(self, prompt, *, cached, of, dp_rank):
            asked.append((prompt, cached, dp_rank))
            return [-float(token) for token in of], 0

    assert agree.parted(Server(), [1, 2], [5, 6, 7], [5, 6, 7]) == 0.0
    assert not asked
    assert agree.parted(Server(), [1, 2], [5, 6, 7], [5, 9, 4], dp_rank=1) == 3.0
    assert asked == [([1, 2, 5], False, 1)]
