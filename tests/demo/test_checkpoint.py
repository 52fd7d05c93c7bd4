"""The small K3's files: official names and shapes, the same bytes every time, whole or absent."""

import hashlib
import json
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file
from sglang.srt.configs.kimi_linear import KimiLinearConfig

from sgl_kimi_k3.demo import checkpoint, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint.ensure(tmp_path_factory.mktemp("cache") / "small")


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


def official_shapes(c):
    """Name -> shape, by the rules the official checkpoint's headers follow."""
    hidden, vocab, linear = c["hidden_size"], c["vocab_size"], c["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width, kernel = heads * dim, linear["short_conv_kernel_size"]
    q, kv, v = c["q_lora_rank"], c["kv_lora_rank"], c["v_head_dim"]
    qk = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    mla_heads, moe = c["num_attention_heads"], c["moe_intermediate_size"]
    latent, experts = c["routed_expert_hidden_size"], c["num_experts"]
    kda = {
        **{f"{n}_proj.weight": (width, hidden) for n in "qkvg"},
        **{f"{n}_conv1d.weight": (width, 1, kernel) for n in "qkv"},
        "b_proj.weight": (heads, hidden),
        "f_a_proj.weight": (dim, hidden),
        "f_b_proj.weight": (width, dim),
        "A_log": (dim,),
        "dt_bias": (width,),
        "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, width),
    }
    mla = {
        "q_a_proj.weight": (q, hidden),
        "q_a_layernorm.weight": (q,),
        "q_b_proj.weight": (mla_heads * qk, q),
        "kv_a_proj_with_mqa.weight": (kv + c["qk_rope_head_dim"], hidden),
        "kv_a_layernorm.weight": (kv,),
        "kv_b_proj.weight": (mla_heads * (c["qk_nope_head_dim"] + v), kv),
        "g_proj.weight": (mla_heads * v, hidden),
        "o_proj.weight": (hidden, mla_heads * v),
    }
    shared = moe * c["num_shared_experts"]
    sparse = {
        "gate.weight": (experts, hidden),
        "gate.e_score_correction_bias": (experts,),
        "routed_expert_down_proj.weight": (latent, hidden),
        "routed_expert_norm.weight": (latent,),
        "routed_expert_up_proj.weight": (hidden, latent),
        "shared_experts.gate_proj.weight": (shared, hidden),
        "shared_experts.up_proj.weight": (shared, hidden),
        "shared_experts.down_proj.weight": (hidden, shared),
        **{f"experts.{e}.{w}.weight": (moe, latent) for e in range(experts) for w in ("w1", "w3")},
        **{f"experts.{e}.w2.weight": (latent, moe) for e in range(experts)},
    }
    dense = {
        "gate_proj.weight": (c["intermediate_size"], hidden),
        "up_proj.weight": (c["intermediate_size"], hidden),
        "down_proj.weight": (hidden, c["intermediate_size"]),
    }
    shapes = {
        "lm_head.weight": (vocab, hidden),
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
    }
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (hidden,)
        for name in ("self_attention_res", "mlp_res"):
            shapes[f"{at}{name}_norm.weight"] = (hidden,)
            shapes[f"{at}{name}_proj.weight"] = (1, hidden)
        attention = mla if layer + 1 in linear["full_attn_layers"] else kda
        shapes |= {f"{at}self_attn.{n}": s for n, s in attention.items()}
        block, ffn = ("mlp", dense) if layer == 0 else ("block_sparse_moe", sparse)
        shapes |= {f"{at}{block}.{n}": s for n, s in ffn.items()}
    return {f"language_model.{name}": shape for name, shape in shapes.items()}


def test_names_and_shapes_are_the_official_ones(tensors):
    assert {n: t.shape for n, t in tensors.items()} == official_shapes(checkpoint.config())
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}


def test_a_log_is_stored_longer_than_the_heads_and_zero_there(tensors):
    heads = checkpoint.config()["linear_attn_config"]["num_heads"]
    a_log = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert np.all(a_log[:heads] != 0)
    assert np.all(a_log[heads:] == 0)


def test_nothing_writes_the_constant_channel(tensors):
    """Row 0 of everything added to the residual stream is zero; only the embedding fills it."""
    into_stream = ("o_proj.weight", "down_proj.weight", "up_proj.weight")
    hidden = checkpoint.config()["hidden_size"]
    rows = {
        name: tensor[0]
        for name, tensor in tensors.items()
        if name.endswith(into_stream) and tensor.shape[0] == hidden
    }
    assert len(rows) == 9 + 9 + 8  # attention, dense and shared FFN, routed FFN
    assert not any(row.any() for row in rows.values())
    assert np.all(tensors["language_model.model.embed_tokens.weight"][:, 0] == checkpoint.CONSTANT)


def test_only_words_are_not_barred(tensors):
    column = tensors["language_model.lm_head.weight"][:, 0]
    words = tokenizer.vocabulary().words
    assert np.flatnonzero(column == 0).tolist() == list(words)
    assert set(np.delete(column, list(words))) == {-checkpoint.BAR}


def test_sglang_reads_the_config(folder):
    config = KimiLinearConfig(**json.loads((folder / "config.json").read_text()))
    assert config.full_attention_layer_ids == [3, 7, 8]
    assert config.linear_layer_ids == [0, 1, 2, 4, 5, 6]
    assert config.is_mla
    assert config.is_moe


def test_written_once_and_the_same_every_time(folder, tmp_path):
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.ensure(folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    again = checkpoint.ensure(tmp_path / "again")
    assert files(again) == files(folder)


def test_of_two_writers_one_wins_and_nothing_is_left_over(tmp_path):
    target = tmp_path / "small"
    writers = [threading.Thread(target=checkpoint.ensure, args=(target,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [p.name for p in tmp_path.iterdir()] == ["small"]
    assert "model.safetensors" in files(target)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoint.ensure(tmp_path / "small")
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_follows_the_cache_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.default_folder().parent == tmp_path / "sgl-kimi-k3"


def files(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
