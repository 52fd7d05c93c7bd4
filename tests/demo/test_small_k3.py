"""The small K3 as a whole, against K3's formulas: the portable model, and what its replies are."""

import json
import random

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgl_kimi_k3.demo import checkpoint, tokenizer
from tests.oracle.small_k3 import SmallK3

WORDS = tokenizer.vocabulary().words


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint.ensure(tmp_path_factory.mktemp("cache") / "small")


@pytest.fixture(scope="module")
def oracle(folder):
    """A maker of fresh sequences; tensors are cast to float64 once."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {
        name: tensor.astype(np.float64)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    return lambda: SmallK3(config, tensors)


def prompt(seed, length):
    return random.Random(f"{seed}").choices(WORDS, k=length)


def test_the_portable_model_computes_what_the_formulas_say(folder, oracle):
    """Loaded under the official names, over SGLang's own pools: every logit of a prefill."""
    import torch
    from sglang.srt.configs.kimi_linear import KimiLinearConfig

    from sgl_kimi_k3.models.kimi_k3 import PortableKimi
    from tests.plugin.model_world import ModelWorld, sglang_runtime

    tokens = prompt("whole model", 70)
    with sglang_runtime():
        config = KimiLinearConfig(**json.loads((folder / "config.json").read_text()))
        model = PortableKimi(config)
        stored = load_file(folder / "model.safetensors").items()
        model.load_weights((name, torch.from_numpy(tensor)) for name, tensor in stored)
        model.post_load_weights()
        served = ModelWorld(model).prefill({"only": tokens})["only"].double().numpy()
    expected = oracle().logits(tokens)
    words = slice(WORDS.start, WORDS.stop)
    np.testing.assert_allclose(served[:, words], expected[:, words], rtol=0, atol=5e-4)
    assert (served.argmax(1) == expected.argmax(1)).all()


def test_only_words_are_ever_likely(oracle):
    """After any token, control tokens and bytes included: no other token within e^-50 of a word."""
    known = tokenizer.vocabulary()
    tokens = [*prompt("mixed", 20), *range(0, 256, 17), known.control("<|end_of_msg|>")]
    logits = oracle().logits(tokens)
    words = logits[:, WORDS.start : WORDS.stop]
    others = np.delete(logits, np.arange(WORDS.start, WORDS.stop), axis=1)
    assert (others.max(1) < words.max(1) - 50).all()


@pytest.mark.parametrize("position", [0, 60])
def test_a_reply_depends_on_tokens_long_past(oracle, position):
    """Else a run from a wrong state would read like the right one."""
    tokens = prompt("past", 120)
    other = [*tokens]
    other[position] = WORDS.start if tokens[position] != WORDS.start else WORDS.start + 1
    words = slice(WORDS.start, WORDS.stop)
    moved = np.abs(oracle().logits(tokens)[-1, words] - oracle().logits(other)[-1, words])
    assert moved.max() > 0.5
