"""The official checkpoint's tensor names, shapes and traps; and transformers as the judge."""

import contextlib
import copy
import inspect
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.runtime_context import get_parallel

from sgl_kimi_k3.models.kimi_k3 import PortableKimi
from tests.plugin.model_world import K3, KIMI_LINEAR, ModelWorld, build_model, sglang_runtime
from tests.plugin.test_model import prompt, whole


@pytest.fixture(scope="module", autouse=True)
def _runtime():
    with sglang_runtime():
        yield


def official(model: PortableKimi) -> dict[str, torch.Tensor]:
    """The model's weights as the official checkpoint stores them, without its prefix."""
    tensors = {}
    for name, param in model.named_parameters():
        data = (
            param.data[: model.config.vocab_size]
            if "embed" in name or "lm_head" in name
            else param.data
        )
        if ".experts.w" in name:
            owner, kind = name.rsplit(".", 1)
            tensors |= {f"{owner}.{e}.{kind}.weight": data[e].clone() for e in range(len(data))}
        else:
            tensors[name] = data.clone()
    return tensors


def blank(settings) -> PortableKimi:
    model = PortableKimi(KimiLinearConfig(**settings))
    for param in model.parameters():
        param.data.fill_(float("nan"))
    return model


@pytest.mark.parametrize("settings", [K3, KIMI_LINEAR], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_official_names_load_with_and_without_their_prefix(settings, prefix) -> None:
    source, target = build_model(settings), blank(settings)
    target.load_weights((prefix + name, data) for name, data in official(source).items())
    tokens = prompt(1, 20)
    assert torch.equal(whole(target, tokens), whole(source, tokens))


def test_logits_are_transformers(tmp_path, monkeypatch) -> None:
    """One random Kimi-Linear checkpoint, read by both under the official names."""
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    for name in (
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
    ):
        # Beneath the wrapper that would call fla's Triton kernels.
        monkeypatch.setattr(theirs, name, inspect.unwrap(getattr(theirs, name)))
    model = build_model(KIMI_LINEAR)
    tensors = official(model)
    for name in list(tensors):
        if name.endswith("A_log"):
            tensors[name] = tensors[name].view(1, 1, -1, 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = KIMI_LINEAR | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = theirs.KimiLinearForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = prompt(7, 100)
    with torch.no_grad():
        expected = other(torch.tensor([tokens])).logits[0]
    out = whole(model, tokens)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=2e-4)
    world = ModelWorld(model)
    world.prefill({"r": tokens[:60]})
    for t in range(60, 70):
        step = world.decode({"r": tokens[t]})["r"][0]
        torch.testing.assert_close(step, expected[t], rtol=1e-3, atol=2e-4)


def test_logits_are_the_official_codes() -> None:
    """A K3 of 13 layers, three closed AttnRes blocks and one that never closes.

    The numbers were computed once from these weights with the modelling code that ships with the
    checkpoint (its fla kernels replaced by fla's naive ones), in float32.
    """
    linear = K3["linear_attn_config"] | {
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
        "full_attn_layers": [4, 8, 12, 13],
    }
    deep = K3 | {"num_hidden_layers": 13, "attn_res_block_size": 4, "linear_attn_config": linear}
    logits = whole(build_model(deep), prompt(3, 120))
    last = [-0.424, 0.568, 0.506, 0.749, 2.299, 1.34, -0.02, -2.857, 0.41, 1.439, -1.188, 0.156]
    middle = [-0.327, -0.014, -0.188, -0.909, -0.949, 0.247]
    greedy = [25, 52, 82, 66, 63, 75, 52, 49, 42, 29, 52, 69, 9, 76, 14, 50]
    torch.testing.assert_close(logits[-1, :12], torch.tensor(last), rtol=0, atol=2e-3)
    torch.testing.assert_close(logits[40, :6], torch.tensor(middle), rtol=0, atol=2e-3)
    assert logits.argmax(-1)[-16:].tolist() == greedy


def test_a_log_is_cut_to_the_heads() -> None:
    """128 stored, 96 real: here 12 stored (one per channel), 4 heads, the rest exactly zero."""
    source, target = build_model(K3), blank(K3)
    tensors = official(source)
    for name in list(tensors):
        if name.endswith("A_log"):
            tensors[name] = torch.cat((tensors[name], torch.zeros(8)))
    target.load_weights(tensors.items())
    for mine, theirs in zip(source.model.layers, target.model.layers, strict=True):
        if hasattr(mine.self_attn, "A_log"):
            assert torch.equal(mine.self_attn.A_log, theirs.self_attn.A_log)


def test_float32_tensors_stay_float32_in_a_bfloat16_model() -> None:
    source = build_model(K3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        target = PortableKimi(source.config)
    finally:
        torch.set_default_dtype(torch.float32)
    tensors = official(source)
    target.load_weights(tensors.items())
    exact = ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias", "o_norm.weight")
    for name, param in target.named_parameters():
        assert param.dtype == (torch.float32 if name.endswith(exact) else torch.bfloat16), name
        if name.endswith(exact):
            assert torch.equal(param.data, tensors[name])
    logits = whole(target, prompt(1, 40))
    assert logits.dtype == torch.bfloat16
    assert bool(logits.isfinite().all())


def test_packed_experts_are_expanded_in_any_order() -> None:
    source, target = build_model(K3), blank(K3)
    tensors = official(source)
    torch.manual_seed(5)
    for name in [n for n in tensors if ".experts." in n and n.endswith(".weight")]:
        rows, columns = tensors.pop(name).shape
        tensors[f"{name}_packed"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{name}_scale"] = torch.full((rows, columns // 32), 122, dtype=torch.uint8)
    target.load_weights(sorted(tensors.items(), reverse=True))
    experts = target.model.layers[1].block_sparse_moe.experts
    first = tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight_packed"][0, 0].item()
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    low = values[first & 7] * (-1 if first & 8 else 1) / 32
    assert experts.w2.data[3, 0, 0].item() == low
    assert bool(whole(target, prompt(1, 20)).isfinite().all())


def test_the_towers_tensors_are_skipped_and_strangers_refused() -> None:
    source = build_model(KIMI_LINEAR)
    tensors = official(source)
    extra = {"vision_tower.blocks.0.weight": torch.zeros(1), "mm_projector.x": torch.zeros(1)}
    blank(KIMI_LINEAR).load_weights((tensors | extra).items())
    with pytest.raises(ValueError, match=r"self_attn\.typo has no place"):
        blank(KIMI_LINEAR).load_weights(
            (tensors | {"model.layers.0.self_attn.typo": extra}).items()
        )


@pytest.mark.parametrize(
    "lost",
    [
        "model.layers.0.self_attn.dt_bias",
        "model.layers.1.block_sparse_moe.experts.2.w3.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_is_an_error(lost) -> None:
    tensors = official(build_model(K3))
    del tensors[lost]
    with pytest.raises(ValueError, match="lacks 1 tensors"):
        blank(K3).load_weights(tensors.items())


def test_half_a_packed_expert_is_an_error() -> None:
    tensors = official(build_model(K3))
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    rows, columns = tensors.pop(name).shape
    tensors[f"{name}_packed"] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="checkpoint lacks"):
        blank(K3).load_weights(tensors.items())


def test_an_activation_or_router_we_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        build_model(K3 | {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match="routes by sigmoid"):
        build_model(K3 | {"moe_router_activation_func": "softmax"})


@contextlib.contextmanager
def as_rank(rank: int):
    """SGLang's view of one of two tensor-parallel ranks, without a second process."""
    group = SimpleNamespace(rank_in_group=rank, world_size=2, cpu_group=None)
    sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2}
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "moe_tp_rank": rank}
    with get_parallel().override(**sizes, **ranks, tp_group=group, attn_tp_group=group):
        yield


def test_two_ranks_hold_the_two_halves() -> None:
    """SGLang starts no second rank on such a CPU, so the halves are compared by themselves."""
    source = build_model(K3)
    tensors, halves = official(source), []
    for rank in range(2):
        with as_rank(rank):
            half = PortableKimi(source.config)
            half.load_weights(tensors.items())
        halves.append(dict(half.named_parameters()))
    split = 0
    for name, param in source.named_parameters():
        first, second = halves[0][name], halves[1][name]
        if first.shape == param.shape:
            assert torch.equal(first, param)
            assert torch.equal(second, param)
        elif "embed_tokens" not in name and "lm_head" not in name:  # SGLang's own, padded
            dim = next(i for i in range(param.dim()) if first.shape[i] != param.shape[i])
            assert torch.equal(torch.cat((first, second), dim), param), name
            split += 1
    assert split > 40
    x, w1 = torch.randn(9, 32), "model.layers.1.block_sparse_moe.experts.w1"
    weights, chosen = torch.rand(9, 2).double(), torch.tensor([[0, 3]]).expand(9, 2)
    whole_sum = source.model.layers[1].block_sparse_moe.experts(x, weights, chosen)
    parts = []
    for half in halves:
        experts = copy.copy(source.model.layers[1].block_sparse_moe.experts)
        experts._parameters = {n: half[w1[:-2] + n] for n in ("w1", "w2", "w3")}
        parts.append(experts(x, weights, chosen))
    torch.testing.assert_close(sum(parts), whole_sum, rtol=1e-5, atol=1e-6)
