"""Absorbed MLA attention over SGLang's latent cache, for a CPU.

SGLang knows this backend as `torch_native`, because it chooses torch code paths elsewhere by that
name. Each request is computed alone and in float64, rounded once: its result does not depend on
the batch or on where a prefill was cut, nor on how many ranks hold the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sgl_kimi_k3.attention.spread import SpreadRows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

QUERY_TOKENS = 256
"""Query tokens per product; bounds the score matrix."""


class Span(NamedTuple):
    """One request's queries in the batch."""

    start: int
    stop: int


class LatentAttnBackend(AttentionBackend):
    """Extend and decode over one latent row [kv_lora_rank + rope] per token, one KV head."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.spans: list[Span] = []
        self.rows: list[Tensor] = []  # the physical cache rows that each span sees
        self.spread: SpreadRows | None = None  # under DCP: how all ranks' rows make those

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Resolve every request's cache rows once for all layers."""
        self.spans, self.rows, self.spread = [], [], None
        if forward_batch.forward_mode.is_idle():
            return
        seq_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode():
            query_lens = [1] * len(seq_lens)
        elif forward_batch.forward_mode.is_target_verify():
            window = forward_batch.spec_info.draft_token_num
            query_lens = [window] * len(seq_lens)
            seq_lens = [length + window for length in seq_lens]  # the drafts' rows lie behind
        else:
            query_lens = forward_batch.extend_seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        start = 0
        for queries in query_lens:
            self.spans.append(Span(start, start + queries))
            start += queries
        requests = forward_batch.req_pool_indices.tolist()
        ids = [
            table[request, :length].to(torch.int64)
            for request, length in zip(requests, seq_lens, strict=True)
        ]
        if get_parallel().attn_dcp_size > 1:
            self.spread = SpreadRows(ids)
            ids = [self.spread.held]
        # Under the unified pool the table holds virtual ids.
        self.rows = [self.kv_index_translator.translate_dcp_read_ids(one) for one in ids]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,  # noqa: FBT001, FBT002  # SGLang's signature
        **_: Any,
    ) -> Tensor:
        """Write the new rows, then attend: q [T, H * D] -> [T, H * v_head_dim]."""
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0]
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for span, seen in zip(self.spans, self._seen(cache), strict=True):
            for start in range(span.start, span.stop, QUERY_TOKENS):
                stop = min(start + QUERY_TOKENS, span.stop)
                depth = len(seen) - (span.stop - start)
                out[start:stop] = attend(
                    q[start:stop].double(), seen, layer.v_head_dim, layer.scaling, depth
                )
        return out.flatten(1)

    def _seen(self, cache: Tensor) -> Iterator[Tensor]:
        """What each span sees of a layer's rows [slots, D]: [length, D], float64."""
        held = (cache[rows] for rows in self.rows)
        for rows in held if self.spread is None else self.spread.gather(next(held)):
            yield rows.double()

    forward_decode = forward_extend

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Tokens of the requests that pad a batch to the other data-parallel ranks' size."""
        return 1

    def support_triton(self) -> bool:
        """Whether SGLang may call its Triton helpers."""
        return False


def attend(q: Tensor, rows: Tensor, rank: int, scale: float, depth: int) -> Tensor:
    """Causal attention of queries at positions depth, depth+1, ... (`naive.latent_attention`).

    Args:
        q: [T, H, D].
        rows: [n, D], n >= depth + T.
        rank: leading columns that are the values.
        scale: softmax scale.
        depth: position of the first query.

    Returns:
        [T, H, rank].
    """
    stop = depth + q.shape[0]
    rows = rows[:stop]
    scores = (q @ rows.t()) * scale
    if q.shape[0] > 1:
        future = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
        scores[..., depth:].masked_fill_(future[:, None], float("-inf"))
    return torch.softmax(scores, -1) @ rows[:, :rank]
