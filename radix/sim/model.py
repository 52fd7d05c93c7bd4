"""What a model costs: bytes of a state and of a token, FLOPs of a prefill."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool import Geometry
from radix import Costs

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Model:
    """One tensor-parallel rank's bytes, and the whole model's arithmetic.

    Attributes:
        name: for people.
        state_bytes: one request's recurrent state over all layers.
        token_bytes: KV of one token over all layers.
        token_flops: one token's prefill without attention scores, 2 x active parameters.
        pair_flops: one (query, key) pair over all attention layers and heads.
    """

    name: str
    state_bytes: int
    token_bytes: int
    token_flops: float
    pair_flops: float

    def flops(self, start: int, end: int) -> float:
        """Prefill of [start, end) after the KV of [0, start)."""
        return self.token_flops * self.costs.recompute(start, end)

    @property
    def costs(self) -> Costs:
        """Recompute in FLOPs, the quadratic part of attention included."""
        return Costs(self.state_bytes, self.token_bytes, self.pair_flops / self.token_flops)

    @property
    def token_costs(self) -> Costs:
        """Recompute in tokens, which is what the server's policy minds."""
        return Costs(self.state_bytes, self.token_bytes)

    def coarse(self, size: int) -> Model:
        """The same with `size` tokens counted as one."""
        return Model(
            self.name,
            self.state_bytes,
            self.token_bytes * size,
            self.token_flops * size,
            self.pair_flops * size * size,
        )

    def geometry(self, capacity_bytes: int, block_size: int) -> Geometry:
        """An arena of that size, its sink included."""
        return Geometry(
            total_bytes=capacity_bytes,
            state_bytes=self.state_bytes,
            block_bytes=self.token_bytes * block_size,
            block_size=block_size,
        )


# Kimi K3's `text_config`, as far as costs go.
K3: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "intermediate_size": 33_792,
    "vocab_size": 163_840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_output_gate": True,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "full_attn_layers": [*range(4, 93, 4), 93],
    },
}


def load(text: str, tp: int = 8) -> Model:
    """`k3-tp8` (any `k3-tpN`), or the path of a Hugging Face config.json on `tp` ranks.

    Raises:
        ValueError: neither; or the config is not of a KDA / MLA hybrid; or heads do not divide.
    """
    from pathlib import Path  # noqa: PLC0415  # at run time only where a path is given

    named = re.fullmatch(r"k3-tp(\d+)", text)
    if named:
        return of_config(text, K3, int(named[1]))
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"--geometry {text} is neither k3-tpN (such as k3-tp8) nor a file")
    return of_config(f"{path}, tp {tp}", _config(path), tp)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
        config = config.get("text_config", config)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--geometry {path} is no config.json: {error}") from None
    assert isinstance(config, dict)
    return config


def of_config(name: str, config: dict[str, Any], tp: int) -> Model:
    """Bytes as the server's, from `mempool.Geometry.of_model`; fp32 states, bf16 KV.

    Raises:
        ValueError: a field is missing, or heads do not divide by `tp`.
    """
    try:
        linear = config["linear_attn_config"]
        n_mla = len(linear["full_attn_layers"])
        n_kda = config["num_hidden_layers"] - n_mla
        rank = Geometry.of_model(
            1 << 40,
            n_kda=n_kda,
            n_mla=n_mla,
            num_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_kernel=linear["short_conv_kernel_size"],
            kv_lora_rank=config["kv_lora_rank"],
            rope_dim=config["qk_rope_head_dim"],
            block_size=64,
            tp=tp,
        )
        active = n_kda * _kda(config) + n_mla * _mla(config) + _ffn(config)
        heads = config["num_attention_heads"]
        keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        pair = n_mla * heads * 2 * (keys + config["v_head_dim"])
    except KeyError as error:
        raise ValueError(f"--geometry {name}: the config has no {error}") from None
    return Model(name, rank.state_bytes, rank.block_bytes // rank.block_size, 2.0 * active, pair)


def _kda(config: dict[str, Any]) -> int:
    """Parameters of one KDA layer: q, k, v, output; the decay's low rank; the output gate."""
    linear = config["linear_attn_config"]
    hidden, wide = config["hidden_size"], linear["num_heads"] * linear["head_dim"]
    low_rank = (hidden + wide) * int(linear["head_dim"])
    gate = hidden * wide if linear.get("use_full_rank_gate") else low_rank
    return int(4 * hidden * wide + low_rank + gate + hidden * linear["num_heads"])


def _mla(config: dict[str, Any]) -> int:
    """Parameters of one MLA layer."""
    hidden, heads, rank = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["kv_lora_rank"],
    )
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    q_rank = config.get("q_lora_rank")
    queries = heads * (nope + rope)
    query = q_rank * (hidden + queries) if q_rank else hidden * queries
    keys = hidden * (rank + rope) + rank * heads * (nope + value)
    outputs = hidden * heads * value * (2 if config.get("mla_use_output_gate") else 1)
    return int(query + keys + outputs)


def _ffn(config: dict[str, Any]) -> int:
    """Active parameters of all feed-forward layers and the output matrix."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    experts = config.get("num_experts") or 0
    dense = layers if not experts else config.get("first_k_dense_replace", 0)
    total = dense * 3 * hidden * config["intermediate_size"] + hidden * config["vocab_size"]
    if experts:
        inner = config["moe_intermediate_size"]
        latent = config.get("routed_expert_hidden_size") or hidden
        routed = 3 * config["num_experts_per_token"] * latent * inner
        shared = 3 * hidden * inner * config.get("num_shared_experts", 0)
        around = 2 * hidden * latent if latent != hidden else 0
        total += (layers - dense) * (routed + shared + around + hidden * experts)
    return int(total)
