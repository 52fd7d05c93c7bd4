"""The sizes in a K3 or Kimi Linear `config.json`, and the weights they imply on one rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_kimi_k3.config import FULL_K3

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
# 4-bit values and one scale byte for every 32 of them.
MXFP4_BYTES = 0.5 + 1 / 32


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks share the work.

    Attributes:
        tp: tensor-parallel ranks, each a GPU.
        dp: replicas of attention among them (`--attn-dp-size`).
        dcp: ranks over which the tokens of one KV cache are spread.

    Raises:
        ValueError: a size is not positive or does not divide what it must.
    """

    tp: int = 1
    dp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for flag, value in (("--tp", self.tp), ("--dp-attention", self.dp), ("--dcp", self.dcp)):
            if value < 1:
                raise ValueError(f"{flag} {value}: must be at least 1")
        if self.tp % self.dp:
            raise ValueError(f"--dp-attention {self.dp} must divide --tp {self.tp}")
        if self.attention_tp % self.dcp:
            raise ValueError(
                f"--dcp {self.dcp} must divide the {self.attention_tp} ranks of one attention "
                "group (--tp / --dp-attention)"
            )

    @property
    def attention_tp(self) -> int:
        """Ranks over which KDA heads are split."""
        return self.tp // self.dp


@dataclass(frozen=True, slots=True)
class Model:
    """What a config says about memory.

    Attributes:
        name: its architecture.
        text: the text tower's part of the config.
        dtype: of weights that are not quantised, as the config names it.
        n_kda, n_mla: layers of each kind.
    """

    name: str
    text: Mapping[str, Any]
    dtype: str
    n_kda: int
    n_mla: int

    @classmethod
    def read(cls, path: str) -> Model:
        """From a `config.json` or a folder that holds one.

        Raises:
            ValueError: no such file, not a config, or a model without KDA layers.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path}: no readable config.json ({error}); give the file or the folder it is in"
            ) from None
        return cls.of(config, str(file))

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str = "config") -> Model:
        """From a parsed config, outer (with `text_config`) or the text tower's own."""
        text = config.get("text_config", config)
        linear = text.get("linear_attn_config") or {}
        name = (config.get("architectures") or ["unknown"])[0]
        if not linear.get("kda_layers"):
            raise ValueError(
                f"{source} ({name}) names no KDA layers; this backend serves Kimi K3 and Kimi"
                " Linear"
            )
        missing = [key for key in ("num_hidden_layers", "kv_lora_rank") if not text.get(key)]
        if missing:
            raise ValueError(f"{source}: {missing[0]} is missing")
        kda = {layer - 1 for layer in linear["kda_layers"]}  # the lists count from 1
        n_kda = len(kda & set(range(text["num_hidden_layers"])))
        dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
        return cls(name, text, dtype, n_kda, text["num_hidden_layers"] - n_kda)

    @property
    def context_len(self) -> int:
        """The longest context the model was made for, in tokens."""
        return int(self.text.get("max_position_embeddings", 4096))

    @property
    def sees(self) -> bool:
        """Whether SGLang loads a vision tower for it."""
        return self.name == FULL_K3

    @property
    def attn_residual(self) -> bool:
        """Whether it is a K3, full or text-only, rather than a Kimi Linear."""
        return bool(self.text.get("attn_res_block_size"))

    @property
    def heads(self) -> int:
        """KDA heads."""
        return int(self.text["linear_attn_config"]["num_heads"])

    @property
    def head_dim(self) -> int:
        """Width of a KDA head."""
        return int(self.text["linear_attn_config"]["head_dim"])

    @property
    def conv_kernel(self) -> int:
        """Tokens that the short convolution sees."""
        return int(self.text["linear_attn_config"].get("short_conv_kernel_size", 4))

    @property
    def kv_lora_rank(self) -> int:
        """Width of the latent KV row."""
        return int(self.text["kv_lora_rank"])

    @property
    def rope_dim(self) -> int:
        """Width of the part of a KV row that all heads share."""
        return int(self.text["qk_rope_head_dim"])


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the text tower's tensors by how ranks hold them.

    Attributes:
        attention: split over the ranks of one attention group.
        split: split over all tensor-parallel ranks.
        whole: on every rank.
    """

    attention: int
    split: int
    whole: int

    @property
    def total(self) -> int:
        """The checkpoint's size."""
        return self.attention + self.split + self.whole

    def on_rank(self, layout: Layout) -> int:
        """Bytes on one rank."""
        parts = self.attention / layout.attention_tp + self.split / layout.tp
        return round(parts) + self.whole

    @classmethod
    def of(cls, model: Model) -> Weights:
        """From the shapes a config implies; vision tower not counted.

        Raises:
            ValueError: a quantisation whose bytes are not known here.
        """
        text, linear = model.text, model.text["linear_attn_config"]
        itemsize = _itemsize(model.dtype)
        expert_bytes = _expert_bytes(text.get("quantization_config"), itemsize)
        hidden, layers = text["hidden_size"], text["num_hidden_layers"]
        dense = text.get("first_k_dense_replace", 0)
        moe_layers = layers - dense if text.get("num_experts") else 0

        embeddings = (1 if text.get("tie_word_embeddings") else 2) * text["vocab_size"] * hidden
        kda_split, kda_whole, kda_fp32 = _kda(linear, hidden)
        mla_split, mla_whole = _mla(text, hidden)
        moe_split, moe_whole, expert = _moe(text, hidden) if moe_layers else (0, 0, 0)
        residual = 4 * hidden if text.get("attn_res_block_size") else 0
        whole = (
            model.n_kda * kda_whole
            + model.n_mla * mla_whole
            + moe_layers * moe_whole
            + layers * (2 * hidden + residual)
            + hidden
            + (2 * hidden if residual else 0)
        )
        split = embeddings + 3 * hidden * text["intermediate_size"] * (layers - moe_layers)
        split += moe_layers * moe_split
        return cls(
            attention=itemsize * (model.n_kda * kda_split + model.n_mla * mla_split)
            + 4 * model.n_kda * kda_fp32,
            split=itemsize * split + round(expert_bytes * moe_layers * expert),
            whole=itemsize * whole,
        )


def _itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype {dtype!r} in the config: expected one of {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


def _expert_bytes(quantization: Mapping[str, Any] | None, itemsize: int) -> float:
    """Bytes of one value of a routed expert; only they are quantised in K3."""
    if not quantization:
        return itemsize
    if quantization.get("format") == "mxfp4-pack-quantized":
        return MXFP4_BYTES
    raise ValueError(
        f"quantization_config {quantization.get('format') or quantization.get('quant_method')!r}: "
        "its bytes are not known here; pass --weight-bytes with one GPU's share"
    )


def _kda(linear: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Values of one KDA layer: split by head, whole, and split but always float32."""
    width, rank = linear["num_heads"] * linear["head_dim"], linear["head_dim"]
    split = 3 * hidden * width  # q, k, v
    split += hidden * linear["num_heads"]  # beta
    split += rank * width  # forget gate, up
    split += width * hidden  # output
    whole = hidden * rank + rank  # forget gate, down; output norm
    if linear.get("use_full_rank_gate"):
        split += hidden * width
    else:
        split, whole = split + rank * width, whole + hidden * rank
    fp32 = width * (3 * linear.get("short_conv_kernel_size", 4) + 1)  # convolutions, dt_bias
    return split, whole, fp32 + linear["head_dim"]  # A_log is stored head_dim long


def _mla(text: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Values of one MLA layer: split by head, whole."""
    heads, latent = text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = (text[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    rank = text.get("q_lora_rank")
    split = heads * ((rank or hidden) * (nope + rope) + latent * (nope + value) + value * hidden)
    if text.get("mla_use_output_gate"):
        split += hidden * heads * value
    whole = hidden * (latent + rope) + latent + (hidden * rank + rank if rank else 0)
    return split, whole


def _moe(text: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Values of one MoE layer: shared experts (split), router and latent (whole), experts."""
    experts, width = text["num_experts"], text["moe_intermediate_size"]
    latent = text.get("routed_expert_hidden_size")
    shared = 3 * hidden * width * (text.get("num_shared_experts") or 0)
    whole = experts * (hidden + 1)
    if latent:
        whole += 2 * hidden * latent + (latent if text.get("latent_moe_use_norm") else 0)
    return shared, whole, experts * 3 * (latent or hidden) * width
