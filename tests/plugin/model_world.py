"""The portable model over SGLang's own pools and attention wrapper, without a server.

Requests are rows of the request table; cache rows and states are handed out in a shuffled order,
and, if asked, under virtual ids, so that nothing works by accident of being contiguous.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.configs.mamba_utils import Mamba2StateDType, mamba2_state_dtype
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear import kda_backend
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs

from sgl_kimi_k3.attention.kda import KdaAttnBackend
from sgl_kimi_k3.attention.mla import LatentAttnBackend
from sgl_kimi_k3.kernels import tiles
from sgl_kimi_k3.models import exact_state_dtype
from sgl_kimi_k3.models.kimi_k3 import PortableKimi

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

ROWS, STATES, REQUESTS, LENGTH = 2048, 24, 12, 512
FLOAT32 = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)

K3: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "attn_res_block_size": 3,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    # The last two layers are both MLA, which no `layer % 4` yields.
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5, 6],
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
}

KIMI_LINEAR: dict[str, Any] = K3 | {
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "num_shared_experts": 1,
    "linear_attn_config": {
        key: value
        for key, value in K3["linear_attn_config"].items()
        if key not in ("use_full_rank_gate", "gate_lower_bound")
    },
}


@contextlib.contextmanager
def sglang_runtime() -> Iterator[None]:
    """SGLang's process-wide configuration and groups for one rank on the CPU.

    A portable model that is built meanwhile puts its backends in place of SGLang's until the end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        mamba_radix_cache_strategy="no_buffer",
        disable_overlap_schedule=True,
    )
    reset_context()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    stock = kda_backend.KDAAttnBackend
    try:
        yield
    finally:
        kda_backend.KDAAttnBackend = stock
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        reset_context()


def build_model(settings: dict[str, Any], *, seed: int = 0) -> PortableKimi:
    """A model with random weights large enough that every path shows in the logits."""
    model = PortableKimi(KimiLinearConfig(**settings))
    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape)
        if "norm.weight" in name or "layernorm" in name:
            param.data = (1 + 0.1 * noise).to(param.dtype)
        elif param.dim() > 1 and "conv1d" not in name:
            param.data = (noise * param.shape[-1] ** -0.5).to(param.dtype)
        else:
            param.data = (0.5 * noise).to(param.dtype)
    model.post_load_weights()
    return model


class Translator:
    """A permutation between virtual and physical ids, id 0 fixed."""

    def __init__(self, count: int, *, virtual: bool, seed: int) -> None:
        order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed)) + 1
        moved = order if virtual else torch.arange(1, count)
        self.physical = torch.cat((torch.zeros(1, dtype=torch.int64), moved))

    def translate_dcp_read_ids(self, ids: Tensor) -> Tensor:
        return self.physical[ids]


class ModelWorld:
    """Runs batches of named requests, each a prefill chunk or a decode step."""

    def __init__(self, model: PortableKimi, *, virtual: bool = False, exact: bool = True) -> None:
        config = model.config
        params = config.mamba2_cache_params
        dtype = exact_state_dtype(mamba2_state_dtype) if exact else FLOAT32
        self.model = model
        self.kv_ids = Translator(ROWS, virtual=virtual, seed=1)
        self.state_ids = Translator(STATES, virtual=virtual, seed=2)
        self.requests = HybridReqToTokenPool(
            size=REQUESTS,
            mamba_size=STATES - 1,
            mamba_spec_state_size=0,
            max_context_len=LENGTH,
            device="cpu",
            enable_memory_saver=False,
            cache_params=dataclasses.replace(params, dtype=dtype),
            mamba_layer_ids=config.linear_layer_ids,
            enable_mamba_extra_buffer=False,
            enable_overlap_schedule=False,
        )
        self.requests.translate_mamba_indices = lambda ids: self.state_ids.physical[ids.long()]
        self.cache = HybridLinearKVPool(
            size=ROWS - 1,
            dtype=torch.float32,
            page_size=1,
            head_num=1,
            head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
            full_attention_layer_ids=config.full_attention_layer_ids,
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
            use_mla=True,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
        )
        runner = SimpleNamespace(
            device="cpu",
            server_args=SimpleNamespace(enable_mis=False),
            is_draft_worker=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.cache,
            kv_index_translator=self.kv_ids,
        )
        self.backend = HybridLinearAttnBackend(
            LatentAttnBackend(runner), KdaAttnBackend(runner), config.full_attention_layer_ids
        )
        shuffled = torch.Generator().manual_seed(3)
        self._rows = iter((torch.randperm(ROWS - 1, generator=shuffled) + 1).tolist())
        self._slots = itertools.count(1)
        self.rows_of: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def poison(self) -> None:
        """Fill every state and cache row but the sinks with NaN, as freed bytes are in tests."""
        state = self.requests.mamba_pool.mamba_cache
        for tensor in (*state.conv, state.temporal):
            tensor[:, 1:] = float("nan")
        for layer in self.cache.full_kv_pool.kv_buffer:
            layer[1:] = float("nan")

    def prefill(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        """One extend batch of chunks; logits [T, vocab] of every token, by request."""
        for name in chunks:
            if name not in self.rows_of:
                self.rows_of[name] = row = len(self.rows_of) + 1
                self.lengths[name] = 0
                self.requests.req_index_to_mamba_index_mapping[row] = next(self._slots)
        lens = [len(tokens) for tokens in chunks.values()]
        depths = [self.lengths[name] for name in chunks]
        starts = [0, *itertools.accumulate(lens)][:-1]
        out = self._forward(
            ForwardMode.EXTEND,
            chunks,
            extend_seq_lens=torch.tensor(lens),
            extend_prefix_lens=torch.tensor(depths),
            extend_start_loc=torch.tensor(starts),
            extend_seq_lens_cpu=lens,
            extend_prefix_lens_cpu=depths,
            extend_num_tokens=sum(lens),
        )
        return dict(zip(chunks, out.split(lens), strict=True))

    def decode(self, tokens: dict[str, int]) -> dict[str, Tensor]:
        """One decode step; logits [1, vocab] by request."""
        out = self._forward(ForwardMode.DECODE, {name: [t] for name, t in tokens.items()})
        return dict(zip(tokens, out.split(1), strict=True))

    def _forward(self, mode: ForwardMode, chunks: dict[str, list[int]], **extend: Any) -> Tensor:
        written = []
        for name, tokens in chunks.items():
            start = self.lengths[name]
            rows = torch.tensor([next(self._rows) for _ in tokens])
            self.requests.req_to_token[self.rows_of[name], start : start + len(tokens)] = rows
            self.lengths[name] = start + len(tokens)
            written.append(rows)
        seq_lens = torch.tensor([self.lengths[name] for name in chunks])
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(chunks),
            input_ids=torch.tensor([t for tokens in chunks.values() for t in tokens]),
            req_pool_indices=torch.tensor([self.rows_of[name] for name in chunks]),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            # What SGLang's plan binds: physical ids, marked so.
            out_cache_loc=self.kv_ids.physical[torch.cat(written)],
            out_cache_loc_is_physical=True,
            seq_lens_sum=int(seq_lens.sum()),
            **extend,
        )
        with forward_context(ForwardContext(attn_backend=self.backend), forward_batch=batch):
            self.backend.init_forward_metadata(batch)
            embeddings = self.model.model.embed_tokens(batch.input_ids)
            hidden = self.model.model(embeddings, batch)
        return tiles.linear(hidden, self.model.lm_head.weight[: self.model.config.vocab_size])
