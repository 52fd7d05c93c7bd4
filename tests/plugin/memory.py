"""One scheduler's memory over SGLang's own pools, and what a forward pass reads and writes there.

A "state" is a fold of the tokens it contains and a KV row is its token, written into the real
bytes and checked wherever a forward would read them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.runtime_context import get_parallel, publish, reset_context
from sglang.srt.server_args import ServerArgs

from sgl_kimi_k3.cache_adapter import KimiK3Cache
from sgl_kimi_k3.config import Options
from sgl_kimi_k3.pools import build_pools

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from sglang.srt.managers.schedule_batch import Req

TOKEN_BYTES = 32  # SGLang rounds an entry up to this
STATE_WORDS = 61  # float32 words of the temporal state: with the conv part, 8 tokens of KV
EXACT = {"interval": 0, "opportunistic": 0, "check": True}


def publish_args(*, page_size: int = 1, **flags: object) -> None:
    """Fill SGLang's process-wide configuration, which everything below reads."""
    reset_context()
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        page_size=page_size,
        chunked_prefill_size=64,
        mamba_radix_cache_strategy="no_buffer",
        disable_overlap_schedule=True,
        radix_cache_backend="kimi_k3",
        **flags,
    )
    args._mamba_cache_chunk_size = 64
    publish(args, role="scheduler")


def drafting_flags(window: int) -> dict[str, object]:
    """What SGLang resolves `--speculative-algorithm NGRAM` to."""
    return {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": window,
        "speculative_num_steps": window,
        "speculative_eagle_topk": 1,
    }


def fold(tokens: list[int] | np.ndarray) -> float:
    """An order-sensitive hash that a float32 holds exactly."""
    value = 1
    for token in tokens:
        value = (value * 31 + int(token) + 7) % 8_388_593
    return float(value)


class Memory:
    """Pools, request rows and tree."""

    def __init__(
        self,
        *,
        tokens: int = 400,
        states: int = 12,
        rows: int = 8,
        chunk: int = 64,
        kernel_chunk: int = 0,
        track: int = 0,
        disable: bool = False,
        device: str = "cpu",
        page_size: int = 1,
        dcp: int = 1,
        rank: int = 0,
        token_bytes: int = TOKEN_BYTES,
        state_words: int = STATE_WORDS,
        context: int = 4096,
        window: int | None = None,
        **options: int,
    ) -> None:
        drafting = {} if window is None else drafting_flags(window)
        publish_args(page_size=page_size, tp_size=dcp, dcp_size=dcp, **drafting)
        if dcp > 1:
            get_parallel().override_permanently(dcp_rank=rank, attn_dcp_rank=rank)
        self.page_size = page_size * dcp  # of the tree, and of every id above it
        self.dcp, self.rank = dcp, rank
        self.device = device  # "meta" has no values: nothing is computed and nothing compared
        params = SimpleNamespace(
            shape=SimpleNamespace(conv=[(3, 2)], temporal=(1, 1, state_words), conv_slice_axis=0),
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            layers=[0],
        )
        bundle = build_pools(
            init_unified_mamba_pools,
            device=device,
            kv_cache_dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            page_size=page_size,
            start_layer=0,
            end_layer=2,
            is_draft_worker=False,
            use_mla_backend=True,
            kv_lora_rank=token_bytes // 2 - 8,
            qk_rope_head_dim=8,
            mamba_layer_ids=[0],
            full_attention_layer_ids=[1],
            mamba2_cache_params=params,
            model_context_len=context,
            extra_max_context_len=4,
            max_total_num_tokens=tokens,
            max_mamba_cache_size=states,
            max_num_reqs=rows,
            enable_memory_saver=False,
            enable_mamba_extra_buffer=False,
            enable_mamba_extra_buffer_lazy=False,
            speculative_num_draft_tokens=window,
            disable_overlap_schedule=True,
            need_sort=False,
            lazy_compaction=True,
        )
        self.rows = bundle.req_to_token_pool
        self.allocator = bundle.token_to_kv_pool_allocator
        self.arena = self.allocator.arena
        self.temporal = self.rows.mamba_pool.mamba_cache.temporal
        self.kv = bundle.token_to_kv_pool.full_kv_pool.kv_buffer[0]
        self.tree = KimiK3Cache(
            CacheInitParams(
                disable=disable,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page_size,
                chunked_prefill_size=chunk,
            ),
            Options(**{"grid": max(4, self.page_size), **EXACT, **options}),
            rule=None,
            kernel_chunk=kernel_chunk,
            track_interval=track,
        )
        self.reserved = 0  # blocks that a test took for itself

    # -- what a forward pass would do --

    def compute(self, req: Req, tokens: list[int], start: int, end: int) -> None:
        """Read the state and the rows of tokens[:start], write the state and rows up to `end`."""
        if self.device == "meta":
            return
        slot = int(self.rows.translate_mamba_indices(req.kv.mamba_pool_idx.view(1)))
        held = self.temporal[0, slot].flatten()
        expected = fold(tokens[:start]) if start else 0.0
        assert held.eq(expected).all(), (req.rid, start, held[:2], expected)
        row = self.rows.req_to_token[req.kv.req_pool_idx, :end].to(torch.int64)
        mine = row % self.dcp == self.rank
        assert mine.nonzero().flatten().tolist() == list(range(self.rank, end, self.dcp)), req.rid
        where = self.allocator.translate_kv_loc(row // self.dcp)
        known = torch.tensor([float(t % 128) for t in tokens[:end]], dtype=self.kv.dtype)
        old = mine[:start].nonzero().flatten()
        assert self.kv[where[old], 0, 0].equal(known[old]), req.rid
        written = self.allocator.translate_write_loc(row[start:])
        assert written.equal(torch.where(mine[start:], where[start:], 0)), req.rid
        self.kv[written] = known[start:].view(-1, 1, 1)
        self.temporal[0, slot] = fold(tokens[:end])

    # -- SGLang's idle invariants, at any time --

    def check_books(self, owners: Sequence[Req], waiting: Sequence[Req]) -> None:
        """Pool, tree, and conservation of every token and state, `owners` being those that run."""
        assert self.allocator.verify_byte_accounting() == []
        size = self.page_size
        private = sum(
            -(-req.kv.kv_allocated_len // size) - req.kv.cache_protected_len // size
            for req in owners
            if req.kv.holds_kv
        )
        captures = [one for req in owners for one in getattr(req, "kimi_k3_captures", ())]
        private += sum(one.tail is not None for one in captures)
        cached = self.tree.full_evictable_size() + self.tree.full_protected_size()
        assert self.arena.pool.live_blocks == cached // size + private + self.reserved
        live = sum(req.kv.holds_mamba for req in [*owners, *waiting])
        live += len(captures)
        cached_states = self.tree.mamba_evictable_size() + self.tree.mamba_protected_size()
        assert self.arena.pool.live_states == cached_states + live
        for req in owners:
            if req.kv.holds_kv and self.device != "meta":  # the host's copy of the row is the row
                row = self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
                known = self.rows.blocks(req.kv.req_pool_idx, 0, -(-len(row) // size))
                assert known.tolist() == (row[::size] // size).tolist()
        if not owners:
            assert self.tree.full_protected_size() == self.tree.mamba_protected_size() == 0
            assert len(self.rows.free_slots) == self.rows.size
