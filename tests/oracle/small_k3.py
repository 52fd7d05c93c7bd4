"""K3's forward pass in NumPy float64, one token at a time, straight from its formulas.

Slow and plain on purpose: no chunks, no batch, no absorbed projections, no shared code with the
portable model. State per layer: the delta-rule matrix and the last raw convolution inputs of a KDA
layer, the expanded keys and values of an MLA layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

PREFIX = "language_model."


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array) -> Array:
    grown = np.exp(x - x.max(-1, keepdims=True))
    return grown / grown.sum(-1, keepdims=True)


def rms_norm(x: Array, weight: Array | float, eps: float = 1e-5) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@dataclass
class SmallK3:
    """One sequence.

    Attributes:
        config: `config.json`.
        tensors: the checkpoint by official name.
        memory: per layer, what the sequence left behind.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]
    memory: dict[int, dict[str, Any]] = field(default_factory=dict)

    def logits(self, tokens: Iterable[int]) -> Array:
        """Feed tokens; logits after each, [T, vocab]."""
        return np.stack([self._token(token) for token in tokens])

    def weight(self, name: str) -> Array:
        return np.asarray(self.tensors[PREFIX + name], np.float64)

    def _token(self, token: int) -> Array:
        block = self.config["attn_res_block_size"]
        head = self.weight("model.embed_tokens.weight")[token]
        bank: list[Array] = []
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            mixed = self._mix(bank, head, f"{at}self_attention_res") if bank else head
            if layer % block == 0:
                bank, head = [*bank, head], np.zeros_like(head)
            normed = rms_norm(mixed, self.weight(f"{at}input_layernorm.weight"))
            head = head + self._attention(normed, layer)
            mixed = self._mix(bank, head, f"{at}mlp_res")
            normed = rms_norm(mixed, self.weight(f"{at}post_attention_layernorm.weight"))
            head = head + self._ffn(normed, layer)
        out = self._mix(bank, head, "model.output_attn_res")
        return self.weight("lm_head.weight") @ rms_norm(out, self.weight("model.norm.weight"))

    def _mix(self, bank: list[Array], head: Array, name: str) -> Array:
        rows = np.stack([*bank, head])
        keys = rms_norm(rows, self.weight(f"{name}_norm.weight"))
        return softmax(keys @ self.weight(f"{name}_proj.weight")[0]) @ rows

    def _attention(self, x: Array, layer: int) -> Array:
        at = f"model.layers.{layer}.self_attn."
        mla = layer + 1 in self.config["linear_attn_config"]["full_attn_layers"]
        memory = self.memory.setdefault(layer, {})
        mixed = (self._mla if mla else self._kda)(x, at, memory)
        gate = sigmoid(self.weight(f"{at}g_proj.weight") @ x)
        return self.weight(f"{at}o_proj.weight") @ (mixed * gate)

    def _kda(self, x: Array, at: str, memory: dict[str, Any]) -> Array:
        linear = self.config["linear_attn_config"]
        heads, dim = linear["num_heads"], linear["head_dim"]
        q, k, v = (self._convolved(x, at, name, memory).reshape(heads, dim) for name in "qkv")
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * dim**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        z = self.weight(f"{at}f_b_proj.weight") @ (self.weight(f"{at}f_a_proj.weight") @ x)
        z = (z + self.weight(f"{at}dt_bias")).reshape(heads, dim)
        scale = np.exp(self.weight(f"{at}A_log")[:heads, None])
        decay = np.exp(linear["gate_lower_bound"] * sigmoid(scale * z))
        beta = sigmoid(self.weight(f"{at}b_proj.weight") @ x)
        state = memory.get("state", np.zeros((heads, dim, dim))) * decay[:, None, :]
        update = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
        memory["state"] = state = state + update[:, :, None] * k[:, None, :]
        out = np.einsum("hvk,hk->hv", state, q)
        return rms_norm(out, self.weight(f"{at}o_norm.weight")).reshape(-1)

    def _convolved(self, x: Array, at: str, name: str, memory: dict[str, Any]) -> Array:
        taps = self.weight(f"{at}{name}_conv1d.weight")[:, 0, :]
        raw = self.weight(f"{at}{name}_proj.weight") @ x
        window = [*memory.get(name, [np.zeros_like(raw)] * taps.shape[1])[1:], raw]
        memory[name] = window
        y = sum(taps[:, j] * past for j, past in enumerate(window))
        return y * sigmoid(y)

    def _mla(self, x: Array, at: str, memory: dict[str, Any]) -> Array:
        heads, rank = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        nope, pe = self.config["qk_nope_head_dim"], self.config["qk_rope_head_dim"]
        low = self.weight(f"{at}q_a_proj.weight") @ x
        low = rms_norm(low, self.weight(f"{at}q_a_layernorm.weight"), 1e-6)
        q = (self.weight(f"{at}q_b_proj.weight") @ low).reshape(heads, nope + pe)
        row = self.weight(f"{at}kv_a_proj_with_mqa.weight") @ x
        latent = rms_norm(row[:rank], self.weight(f"{at}kv_a_layernorm.weight"), 1e-6)
        expanded = (self.weight(f"{at}kv_b_proj.weight") @ latent).reshape(heads, -1)
        shared = np.broadcast_to(row[rank:], (heads, pe))
        key = np.concatenate([expanded[:, :nope], shared], axis=1)
        memory.setdefault("keys", []).append(key)
        memory.setdefault("values", []).append(expanded[:, nope:])
        scores = np.einsum("thd,hd->ht", np.stack(memory["keys"]), q) * (nope + pe) ** -0.5
        values = np.stack(memory["values"])
        return np.einsum("ht,thv->hv", softmax(scores), values).reshape(-1)

    def _ffn(self, x: Array, layer: int) -> Array:
        if layer < self.config["first_k_dense_replace"]:
            return self._mlp(x, f"model.layers.{layer}.mlp.", "gate_proj", "up_proj", "down_proj")
        at = f"model.layers.{layer}.block_sparse_moe."
        scores = sigmoid(self.weight(f"{at}gate.weight") @ x)
        ranked = np.argsort(-(scores + self.weight(f"{at}gate.e_score_correction_bias")))
        chosen = ranked[: self.config["num_experts_per_token"]]
        shares = scores[chosen] / scores[chosen].sum() * self.config["routed_scaling_factor"]
        latent = self.weight(f"{at}routed_expert_down_proj.weight") @ x
        routed = sum(
            share * self._mlp(latent, f"{at}experts.{expert}.", "w1", "w3", "w2")
            for share, expert in zip(shares, chosen, strict=True)
        )
        routed = rms_norm(routed, self.weight(f"{at}routed_expert_norm.weight"))
        shared = self._mlp(x, f"{at}shared_experts.", "gate_proj", "up_proj", "down_proj")
        return self.weight(f"{at}routed_expert_up_proj.weight") @ routed + shared

    def _mlp(self, x: Array, at: str, gate: str, up: str, down: str) -> Array:
        g, u = self.weight(f"{at}{gate}.weight") @ x, self.weight(f"{at}{up}.weight") @ x
        beta = self.config["activation_situ_beta"]
        linear = self.config["activation_situ_linear_beta"]
        act = beta * np.tanh(g / beta) * sigmoid(g) * linear * np.tanh(u / linear)
        return self.weight(f"{at}{down}.weight") @ act
