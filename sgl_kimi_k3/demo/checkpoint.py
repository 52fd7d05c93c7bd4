"""Write a small K3 to a cache folder: config, seeded weights under the official names, tokenizer.

Every part of K3 is there at toy size: KDA with the safe gate, Gated MLA, AttnRes blocks of which
the last never closes, a dense first layer, latent MoE with shared experts, and a layer list that
no `l % 4` yields (the last two layers are both MLA, as in the official one). Tensors carry the
official checkpoint's names and shape rules; `A_log` is stored `head_dim` long of which the first
`heads` entries are real. Two differences, for a CPU: everything is float32, and routed experts are
plain `w1/w2/w3.weight` instead of MXFP4 pairs.

Random weights speak noise, so two things are arranged rather than random:

- *Only words are sampled.* Embedding channel 0 holds one constant. No layer writes channel 0 (row
  0 of every projection into the residual stream is zero) and AttnRes mixes rows by a convex sum,
  so the channel reaches `lm_head` as a positive number, where column 0 is `-BAR` for every token
  that is not a word. `tokenizer` explains why replies must be words.
- *The past matters.* Decay rates span a few to a few hundred tokens, and attention scores are
  sharp, so that a reply computed from a wrong state or a wrong cache row reads differently.

Run it: `python -m sgl_kimi_k3.demo.checkpoint [FOLDER]` prints the model's path.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from sgl_kimi_k3.demo import tokenizer

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]

VERSION = 1
BAR = 400.0  # logits of words stay within +-30; 0.1 of the constant channel is left at worst
CONSTANT = 4.0

_HIDDEN = 128
_HEADS = 4
_HEAD_DIM = 32
_LAYERS = 9
_MLA_LAYERS = [4, 8, 9]  # 1-based, as in the official config


def config() -> dict[str, Any]:
    """The model's `config.json`: text-only K3 at toy size."""
    known = tokenizer.vocabulary()
    return {
        "architectures": ["KimiK3LinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "float32",
        "vocab_size": known.size,
        "hidden_size": _HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 4,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1 << 17,
        "bos_token_id": known.control("[BOS]"),
        "eos_token_id": known.control("<|end_of_msg|>"),
        "pad_token_id": known.control("[PAD]"),
        "linear_attn_config": {
            "num_heads": _HEADS,
            "head_dim": _HEAD_DIM,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "kda_layers": [n for n in range(1, _LAYERS + 1) if n not in _MLA_LAYERS],
            "full_attn_layers": _MLA_LAYERS,
        },
    }


def default_folder() -> Path:
    """Where the model lives unless a folder is named; its name changes with its content."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sgl-kimi-k3" / f"small-k3-v{VERSION}-{_fingerprint()}"


def ensure(folder: Path | None = None) -> Path:
    """The model folder, written if it is not there.

    The folder appears by one rename, so a reader never sees half of it and of two writers one wins.
    """
    target = folder or default_folder()
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(staging)
        staging.rename(target)
    except OSError:
        if not (target / "config.json").exists():  # not just a race that the other writer won
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _write(folder: Path) -> None:
    tensors = weights(config())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.write(folder)
    stop = {key: config()[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(stop, indent=2) + "\n", "utf-8")
    (folder / "config.json").write_text(json.dumps(config(), indent=2) + "\n", "utf-8")


def _fingerprint() -> str:
    """Eight hex digits over what decides the folder's content."""
    digest = hashlib.sha256(json.dumps(config(), sort_keys=True).encode())
    package = resources.files(__package__)
    for source in ("checkpoint.py", "tokenizer.py", "tokenization_small_k3.py", "words.txt"):
        digest.update(package.joinpath(source).read_bytes())
    return digest.hexdigest()[:8]


class _Draw:
    """Seeded matrices; calls must keep their order, which is what makes the weights repeatable."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> Array:
        """[rows, columns], so that inputs of unit RMS give outputs of RMS `gain`."""
        return self.normal(rows, columns, scale=gain / columns**0.5)

    def residual(self, columns: int, gain: float = 1.0) -> Array:
        """[hidden, columns] into the residual stream: channel 0 is never written."""
        drawn = self.linear(_HIDDEN, columns, gain)
        drawn[0] = 0.0
        return drawn

    def norm(self, width: int) -> Array:
        """[width], near one."""
        return (1.0 + 0.1 * self.normal(width)).clip(0.5, 1.5)

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        """Normal values."""
        return (scale * self._random.standard_normal(shape)).astype(np.float32)

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        """Uniform values."""
        return self._random.uniform(low, high, shape).astype(np.float32)


def weights(sizes: dict[str, Any], seed: int = 20250) -> Tensors:
    """All tensors of the checkpoint by official name, float32."""
    draw = _Draw(seed)
    words = tokenizer.vocabulary().words
    embedding = draw.normal(sizes["vocab_size"], _HIDDEN)
    embedding[:, 0] = CONSTANT
    head = draw.linear(sizes["vocab_size"], _HIDDEN, gain=4.0)
    head[:, 0] = -BAR
    head[words.start : words.stop, 0] = 0.0
    tensors = {
        "language_model.model.embed_tokens.weight": embedding,
        "language_model.lm_head.weight": head,
        "language_model.model.norm.weight": draw.norm(_HIDDEN),
        "language_model.model.output_attn_res_norm.weight": draw.norm(_HIDDEN),
        "language_model.model.output_attn_res_proj.weight": draw.linear(1, _HIDDEN, gain=0.5),
    }
    for layer in range(_LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        tensors |= {prefix + name: tensor for name, tensor in _layer(draw, sizes, layer)}
    return tensors


def _layer(draw: _Draw, sizes: dict[str, Any], layer: int) -> Iterator[tuple[str, Array]]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", draw.norm(_HIDDEN)
    for name in ("self_attention_res", "mlp_res"):
        yield f"{name}_norm.weight", draw.norm(_HIDDEN)
        yield f"{name}_proj.weight", draw.linear(1, _HIDDEN, gain=0.5)
    attention = _mla if layer + 1 in _MLA_LAYERS else _kda
    for name, tensor in attention(draw, sizes):
        yield f"self_attn.{name}", tensor
    if layer < sizes["first_k_dense_replace"]:
        for name, tensor in _mlp(draw, sizes["intermediate_size"]):
            yield f"mlp.{name}", tensor
    else:
        for name, tensor in _moe(draw, sizes):
            yield f"block_sparse_moe.{name}", tensor


def _kda(draw: _Draw, sizes: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    heads, width = _HEADS, _HEADS * _HEAD_DIM
    kernel = sizes["linear_attn_config"]["short_conv_kernel_size"]
    for name in ("q", "k", "v"):
        yield f"{name}_proj.weight", draw.linear(width, _HIDDEN, gain=2.0)
        yield f"{name}_conv1d.weight", draw.normal(width, 1, kernel, scale=0.6)
    yield "g_proj.weight", draw.linear(width, _HIDDEN)
    yield "b_proj.weight", draw.linear(heads, _HIDDEN)
    yield "f_a_proj.weight", draw.linear(_HEAD_DIM, _HIDDEN)
    yield "f_b_proj.weight", draw.linear(width, _HEAD_DIM)
    a_log = np.zeros(_HEAD_DIM, np.float32)
    a_log[:heads] = draw.uniform(-0.5, 0.5, heads)
    yield "A_log", a_log
    yield "dt_bias", draw.uniform(-8.0, -2.0, width)
    yield "o_norm.weight", draw.norm(_HEAD_DIM)
    yield "o_proj.weight", draw.residual(width, gain=3.0)


def _mla(draw: _Draw, sizes: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    nope, rope, value = (sizes[f"{n}_head_dim"] for n in ("qk_nope", "qk_rope", "v"))
    q_rank, kv_rank = sizes["q_lora_rank"], sizes["kv_lora_rank"]
    yield "q_a_proj.weight", draw.linear(q_rank, _HIDDEN)
    yield "q_a_layernorm.weight", draw.norm(q_rank)
    yield "q_b_proj.weight", draw.linear(_HEADS * (nope + rope), q_rank, gain=2.0)
    yield "kv_a_proj_with_mqa.weight", draw.linear(kv_rank + rope, _HIDDEN)
    yield "kv_a_layernorm.weight", draw.norm(kv_rank)
    yield "kv_b_proj.weight", draw.linear(_HEADS * (nope + value), kv_rank, gain=1.5)
    yield "g_proj.weight", draw.linear(_HEADS * value, _HIDDEN)
    yield "o_proj.weight", draw.residual(_HEADS * value, gain=3.0)


def _mlp(draw: _Draw, width: int) -> Iterator[tuple[str, Array]]:
    yield "gate_proj.weight", draw.linear(width, _HIDDEN)
    yield "up_proj.weight", draw.linear(width, _HIDDEN)
    yield "down_proj.weight", draw.residual(width)


def _moe(draw: _Draw, sizes: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    latent, width = sizes["routed_expert_hidden_size"], sizes["moe_intermediate_size"]
    experts = sizes["num_experts"]
    yield "gate.weight", draw.linear(experts, _HIDDEN)
    yield "gate.e_score_correction_bias", draw.normal(experts, scale=0.1)
    yield "routed_expert_down_proj.weight", draw.linear(latent, _HIDDEN)
    yield "routed_expert_norm.weight", draw.norm(latent)
    yield "routed_expert_up_proj.weight", draw.residual(latent)
    for name, tensor in _mlp(draw, width * sizes["num_shared_experts"]):
        yield f"shared_experts.{name}", tensor
    for expert in range(experts):
        yield f"experts.{expert}.w1.weight", draw.linear(width, latent)
        yield f"experts.{expert}.w3.weight", draw.linear(width, latent)
        yield f"experts.{expert}.w2.weight", draw.linear(latent, width)


def main() -> None:
    """Write the model and print where it is."""
    parser = argparse.ArgumentParser(description="Write the small K3 and print its folder.")
    parser.add_argument("folder", nargs="?", type=Path, help=f"default: {default_folder()}")
    print(ensure(parser.parse_args().folder))


if __name__ == "__main__":
    main()
