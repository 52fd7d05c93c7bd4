"""The portable model: batches, cuts and slots must not show in its logits."""

import random

import pytest
import torch

from tests.plugin.model_world import K3, KIMI_LINEAR, ModelWorld, build_model, sglang_runtime


@pytest.fixture(scope="module", params=["k3", "kimi_linear"])
def model(request):
    with sglang_runtime():
        yield build_model({"k3": K3, "kimi_linear": KIMI_LINEAR}[request.param])


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(97) for i in range(length)]


def whole(model, tokens) -> torch.Tensor:
    return ModelWorld(model).prefill({"only": tokens})["only"]


def test_a_batch_gives_the_bits_of_each_request_alone(model) -> None:
    """Three requests that start off the chunk grid, and one of a single token (cases C10)."""
    prompts = {f"r{i}": prompt(i, n) for i, n in enumerate((37, 50, 1, 33))}
    together = ModelWorld(model).prefill(prompts)
    for name, tokens in prompts.items():
        assert torch.equal(together[name], whole(model, tokens))


def in_parts(world: ModelWorld, tokens: list[int], cuts: tuple[int, ...]) -> torch.Tensor:
    """Prefill by chunks, each beside a stranger that moves every row of the batch."""
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        out = world.prefill({f"s{start}": prompt(99, start + 3), "r": tokens[start:stop]})
        parts.append(out["r"])
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [(16, 48), (64,), (1,), (7, 9, 40), (15,), (17,), (79,)])
def test_a_prefill_cut_anywhere_gives_the_same_bits(model, cuts) -> None:
    """First chunk of one token included: a prefix makes a resume, not a length (cases C13)."""
    tokens, world = prompt(1, 80), ModelWorld(model)
    world.poison()
    assert torch.equal(in_parts(world, tokens, cuts), whole(model, tokens))


def test_float32_states_are_exact_on_the_chunk_grid_and_round_elsewhere(model) -> None:
    """What `--mamba-ssm-dtype float32` brings back."""
    tokens = prompt(1, 80)
    expected = ModelWorld(model, exact=False).prefill({"only": tokens})["only"]
    assert torch.equal(in_parts(ModelWorld(model, exact=False), tokens, (16, 48)), expected)
    out = in_parts(ModelWorld(model, exact=False), tokens, (17,))
    assert not torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_decode_gives_the_bits_of_prefill(model) -> None:
    prompts = {f"r{i}": prompt(i, n) for i, n in enumerate((21, 34, 2))}
    world = ModelWorld(model)
    world.poison()
    world.prefill({name: tokens[:-8] or tokens[:1] for name, tokens in prompts.items()})
    for name, tokens in prompts.items():
        expected = whole(model, tokens)
        for t in range(world.lengths[name], len(tokens)):
            assert torch.equal(world.decode({name: tokens[t]})[name][0], expected[t])


def test_decode_rows_do_not_touch(model) -> None:
    names = [f"r{i}" for i in range(5)]
    prompts = {name: prompt(i, 10 + i) for i, name in enumerate(names)}
    together, alone = ModelWorld(model), ModelWorld(model)
    together.prefill(prompts)
    alone.prefill(prompts)
    for step in range(3):
        batch = together.decode(dict.fromkeys(reversed(names), step))
        for name in names:
            assert torch.equal(batch[name], alone.decode({name: step})[name])


def test_virtual_ids_are_translated_on_read_and_write(model) -> None:
    tokens, world = prompt(1, 40), ModelWorld(model, virtual=True)
    world.poison()
    head = world.prefill({"other": prompt(2, 9), "r": tokens[:16]})["r"]
    tail = world.prefill({"r": tokens[16:39]})["r"]
    last = world.decode({"r": tokens[39], "other": 5})["r"]
    expected = whole(model, tokens)
    assert torch.equal(torch.cat((head, tail, last)), expected)


def test_padding_rows_write_to_the_sink(model) -> None:
    """Request row 0 maps to state 0; a decode batch padded with it leaves others as they are."""
    world, tokens = ModelWorld(model), prompt(1, 20)
    world.prefill({"r": tokens})
    world.rows_of["padding"], world.lengths["padding"] = 0, 0
    out = world.decode({"r": 3, "padding": 0})["r"]
    plain = ModelWorld(model)
    plain.prefill({"r": tokens})
    assert torch.equal(out, plain.decode({"r": 3})["r"])


def test_every_weight_shows_in_the_logits(model) -> None:
    """A parameter that is loaded and then forgotten would leave the logits as they are."""
    tokens = prompt(1, 30)
    before = whole(model, tokens)
    for name, param in model.named_parameters():
        if "layers.0.self_attention_res" in name:
            continue  # the first read is of the embedding alone
        kept = param.data.clone()
        param.data += 2 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
        model.post_load_weights()
        changed = not torch.equal(whole(model, tokens), before)
        param.data = kept
        assert changed, f"{name} has no effect"
    model.post_load_weights()
    assert torch.equal(whole(model, tokens), before)
