"""The portable Kimi K3 text tower: wiring and weight names.

One class serves K3 (block attention residuals, latent MoE, SiTU, safe gate, output gates) and
Kimi-Linear (plain residuals, plain MoE, SiLU, softplus gate); the config says which. Parameter
names are the official checkpoint's, without its `language_model.` prefix.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

from sgl_kimi_k3.attention import register_cpu_backends
from sgl_kimi_k3.kernels import pointwise
from sgl_kimi_k3.models.attention import GatedLatentAttention, KimiDeltaAttention
from sgl_kimi_k3.models.linear import Norm, TiledLinearMethod
from sgl_kimi_k3.models.moe import DenseMlp, Experts, SparseMoe, activation_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.configs.kimi_linear import KimiLinearConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)$")
_FOREIGN = ("vision_tower.", "mm_projector.")
"""The checkpoint's tensors outside the text tower."""


class ResidualQuery(nn.Module):
    """The query of one block-attention-residual read, [1, hidden] as in the checkpoint."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden), requires_grad=False)


class ResidualBank:
    """Finished blocks and the running head of one forward pass (report, section 2.2).

    Nothing of it outlives the pass, so a cached prefix needs none of it.
    """

    def __init__(self, embeddings: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.head: Tensor | None = embeddings

    def read(self, query: ResidualQuery, norm: Norm) -> Tensor:
        """The mix of all blocks and the head; the head itself while there is no block."""
        assert self.head is not None, "a read follows an add"
        if not self.blocks:
            return self.head
        rows = torch.stack((*self.blocks, self.head))
        return pointwise.mix(rows, query.weight[0], norm.weight, norm.eps)

    def close(self) -> None:
        """The head becomes a finished block; a new one starts with the next add."""
        assert self.head is not None, "a block holds at least one output"
        self.blocks.append(self.head)
        self.head = None

    def add(self, output: Tensor) -> None:
        """Add one sublayer's output to the head."""
        self.head = output if self.head is None else self.head + output


class DecoderLayer(nn.Module):
    """Token mixer and feed-forward layer with their norms and residual reads."""

    def __init__(self, config: KimiLinearConfig, layer_id: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        kda = config.is_kda_layer(layer_id)
        self.self_attn = (KimiDeltaAttention if kda else GatedLatentAttention)(config, layer_id)
        if _is_sparse(config, layer_id):
            self.block_sparse_moe = SparseMoe(config)
        else:
            self.mlp = DenseMlp(hidden, config.intermediate_size, activation_of(config))
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.block_size = config.attn_res_block_size
        if self.block_size is not None:
            self.closes_block = layer_id % self.block_size == 0
            self.self_attention_res_proj = ResidualQuery(hidden)
            self.self_attention_res_norm = Norm(hidden, eps)
            self.mlp_res_proj = ResidualQuery(hidden)
            self.mlp_res_norm = Norm(hidden, eps)

    def attend(self, x: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """Norm and token mixer; rows of an idle data-parallel rank are only padding."""
        if forward_batch.forward_mode.is_idle():
            return x
        norm = self.input_layernorm
        return self.self_attn(pointwise.rms_norm(x, norm.weight, norm.eps), forward_batch)

    def feed(self, x: Tensor) -> Tensor:
        """Norm and feed-forward layer."""
        norm = self.post_attention_layernorm
        ffn = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return ffn(pointwise.rms_norm(x, norm.weight, norm.eps))

    def forward(self, bank: ResidualBank, forward_batch: ForwardBatch) -> None:
        """Add this layer's two outputs to the bank."""
        if self.block_size is None:
            bank.add(self.attend(bank.head, forward_batch))
            bank.add(self.feed(bank.head))
            return
        x = bank.read(self.self_attention_res_proj, self.self_attention_res_norm)
        if self.closes_block:
            # Before the attention's output is added: it belongs to the new block.
            bank.close()
        bank.add(self.attend(x, forward_batch))
        bank.add(self.feed(bank.read(self.mlp_res_proj, self.mlp_res_norm)))


def _is_sparse(config: KimiLinearConfig, layer_id: int) -> bool:
    return (
        config.is_moe
        and layer_id >= config.first_k_dense_replace
        and layer_id % config.moe_layer_freq == 0
    )


class TextModel(nn.Module):
    """Embedding, layers and the final read and norm."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, use_attn_tp_group=is_dp_attention_enabled()
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_id) for layer_id in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_proj = ResidualQuery(config.hidden_size)
            self.output_attn_res_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embeddings: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """[T, hidden] embeddings -> [T, hidden] normed."""
        bank = ResidualBank(embeddings)
        for layer in self.layers:
            layer(bank, forward_batch)
        if hasattr(self, "output_attn_res_proj"):
            out = bank.read(self.output_attn_res_proj, self.output_attn_res_norm)
        else:
            out = bank.head
        return pointwise.rms_norm(out, self.norm.weight, self.norm.eps)


class PortableKimi(nn.Module):
    """SGLang's model interface; see the module docstring."""

    def __init__(
        self, config: KimiLinearConfig, quant_config: Any = None, prefix: str = ""
    ) -> None:
        super().__init__()
        # The checkpoint quantises the routed experts alone; `Experts.load` expands them.
        del quant_config, prefix
        if get_parallel().pp_size > 1:
            raise ValueError("the portable model is not split into stages: leave out --pp-size")
        self.config = config
        self.model = TextModel(self.config)
        self.lm_head = ParallelLMHead(
            self.config.vocab_size,
            self.config.hidden_size,
            use_attn_tp_group=get_parallel().enable_dp_lm_head,
        )
        self.lm_head.quant_method = TiledLinearMethod()
        self.logits_processor = LogitsProcessor(self.config)
        if self.lm_head.weight.device.type == "cpu":
            register_cpu_backends()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, as SGLang asks for it."""
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
    ) -> Any:
        """One forward pass; `positions` are unused because nothing is rotated."""
        del positions
        embeddings = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        hidden = self.model(embeddings, forward_batch)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the official checkpoint's tensors, with or without `language_model.`.

        Raises:
            ValueError: for a tensor this model has no place for, or one it lacks at the end.
        """
        params, experts = dict(self.named_parameters()), dict(self.named_modules())
        missing = {name for name in params if ".experts.w" not in name}
        pending = {
            (name, e, w)
            for name, module in experts.items()
            if isinstance(module, Experts)
            for e in range(module.w1.shape[0])
            for w in ("w1", "w2", "w3")
        }
        for full_name, tensor in weights:
            name = full_name.removeprefix("language_model.")
            if name.startswith(_FOREIGN) or "rotary_emb." in name:
                continue
            if match := _EXPERT.match(name):
                owner, expert, kind, form = match.groups()
                experts[owner].load(int(expert), kind, form, tensor)
                pending.discard((owner, int(expert), kind))
            elif name in params:
                loader = getattr(params[name], "weight_loader", default_weight_loader)
                loader(params[name], tensor)
                missing.discard(name)
            else:
                raise ValueError(f"checkpoint tensor {full_name} has no place in this model")
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            missing.discard("lm_head.weight")
        halves = [n for n, m in experts.items() if isinstance(m, Experts) and m.unfinished()]
        if missing or pending or halves:
            names = sorted(missing) + [".".join(map(str, p)) for p in sorted(pending)] + halves
            raise ValueError(f"checkpoint lacks {len(names)} tensors, first {names[:3]}")
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Derive what the layers compute with; SGLang's dummy loader calls this alone."""
        for layer in self.model.layers:
            layer.self_attn.post_load()


class KimiK3LinearForCausalLM(PortableKimi):
    """K3's text tower: the official `text_config` under this architecture name.

    The whole checkpoint's outer class (with the vision tower) is not served on a CPU.
    """


class KimiLinearForCausalLM(PortableKimi):
    """Kimi-Linear."""


EntryClass = [KimiK3LinearForCausalLM, KimiLinearForCausalLM]
