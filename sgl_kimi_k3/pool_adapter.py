"""SGLang's allocator of KV over the arena: SGLang's words stop here.

SGLang's "page" is our block, its "mamba slot" our state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.kernels.ops.memory.virtual_slot import translate_token_ids
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import next_power_of_2

from mempool.storage import upload
from sgl_kimi_k3.arena import NO_IDS, Arena
from sgl_kimi_k3.budget import JointPrefillBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool import IdArray
    from sgl_kimi_k3.cache_adapter import KimiK3Cache
    from sgl_kimi_k3.rows import RequestRows
    from sgl_kimi_k3.slots import StateSlotAllocator

COMPACTION_BYTES_PER_CALL = 64 << 20
# Tokens of a forward that Triton compiles the translation apart for: one, a multiple of 16, others.
WARM_COUNTS = (1, 16, 2)


class ArenaAllocator(UnifiedMambaTokenToKVPoolAllocator):
    """`token_to_kv_pool_allocator`: KV blocks by virtual id, and the scheduler's capacity hooks.

    Token ids are `block id * page_size + offset`.  Under DCP `page_size` is that of all ranks of a
    group: a block's rows lie one in `dcp` on each, that of a token on rank `id % dcp`, where it is
    row `id // dcp` of the rank's own.  Subclasses SGLang's composite because its id translator and
    admission recognise that class; none of its state is used.
    """

    def __init__(  # the parts of SGLang's bundle
        self,
        *,
        arena: Arena,
        slots: StateSlotAllocator,
        rows: RequestRows,
        unified_buffer: Any,
        kvcache: Any,
        dtype: torch.dtype,
        need_sort: bool,
    ) -> None:
        self.arena = arena
        self.mamba_allocator = slots
        self._rows = rows
        self.unified_buffer = unified_buffer
        self._kvcache = kvcache
        parallel = get_parallel()
        self.page_size = arena.geometry.block_size
        self._dcp_size = parallel.attn_dcp_size
        self._dcp_rank = parallel.attn_dcp_rank if self._dcp_size > 1 else 0
        self.dtype = dtype
        self.device = arena.device
        self.need_sort = need_sort
        self.lazy_compaction = True
        self.free_pages = self.release_pages = None
        self.free_group: list[torch.Tensor] | None = None
        self._freed_blocks: list[IdArray] | None = None
        self.tree: KimiK3Cache | None = None

    # -- capacity --

    @property
    def size(self) -> int:
        """Tokens that are allocated or could be now; the sum SGLang's leak check conserves."""
        return self.available_size() + self.arena.pool.live_blocks * self.page_size

    @property
    def size_full(self) -> int:
        """Highest token id the tables know."""
        return self.arena.geometry.max_blocks * self.page_size

    @property
    def size_mamba(self) -> int:
        """Highest number of states."""
        return self.arena.geometry.max_states

    @property
    def draft_virtual_id_space(self) -> int:
        """Token ids a draft model's tables must cover."""
        return self.size_full

    def available_size(self) -> int:
        """Tokens that can be allocated now without evicting."""
        return self.arena.pool.fundable_blocks() * self.page_size

    def full_available_size(self) -> int:
        """Same as `available_size`: one arena."""
        return self.available_size()

    def mamba_slot_full_token_cost(self) -> int:
        """Tokens of KV whose bytes one state takes, rounded up."""
        geometry = self.arena.geometry
        return -(-geometry.state_bytes // geometry.block_bytes) * self.page_size

    def create_prefill_budget(
        self, tree_cache: KimiK3Cache, *, num_mixed_decode_tokens: int = 0
    ) -> JointPrefillBudget:
        """Admission's budget: free and evictable bytes of both kinds, counted once."""
        return JointPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def get_extend_allocation_demand(
        self,
        prefix_lens_cpu: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *,
        conservative_num_tokens: int,  # noqa: ARG002  # SGLang's signature
        shard_size: int,  # noqa: ARG002
    ) -> int:
        """Tokens of the blocks that `alloc_extend` will take, exactly: no more is evicted."""
        return self._new_blocks(prefix_lens_cpu, seq_lens_cpu) * self.page_size

    def _new_blocks(self, prefix_lens_cpu: torch.Tensor, seq_lens_cpu: torch.Tensor) -> int:
        size = self.page_size
        before, after = (-(-lens // size) for lens in (prefix_lens_cpu, seq_lens_cpu))
        return int((after - before).sum())

    def evict_to_free_tokens(self, tree_cache: KimiK3Cache, num_tokens: int) -> bool | None:
        """Evict, whichever kind is cheaper, until `num_tokens` fit; False if they cannot."""
        blocks = self._blocks_for(num_tokens)
        if self.arena.fits(0, blocks):  # twice in every decode step, and nearly always true
            return True
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        return tree_cache.room.make(states=0, blocks=blocks)

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: KimiK3Cache,
        requests: Any = None,  # noqa: ARG002  # SGLang's signature
        spec_algorithm: Any = None,  # noqa: ARG002
    ) -> bool:
        """Whether the next decode step's tokens fit, after evicting what must go for them."""
        return bool(self.evict_to_free_tokens(tree_cache, num_tokens))

    def verify_byte_accounting(self) -> list[str]:
        """Recount pool and tree from scratch if asked to; SGLang calls this when idle.

        SGLang's own conservation check of tokens and states, beside this, is always on.
        """
        return [] if self.tree is None else self.tree.idle()

    def mamba_full_cache_donor(self) -> None:
        """Stock's two-step donation is not needed: eviction already sees both kinds."""

    def debug_print(self) -> str:
        """One line for SGLang's logs."""
        return str(self.arena.pool.report())

    allocator_state_str = debug_print

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether the token id's block is live."""
        return bool(self.arena.pool.blocks.indices[int(slot) // self.page_size])

    # -- allocation --

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self, blocks: int) -> torch.Tensor | None:
        grant = self.arena.alloc(0, blocks)
        if grant is None:
            return None
        self._rows.granted(grant.blocks)
        return self.arena.block_ids.of(grant.blocks)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take whole blocks for `need_size` tokens: int64 token ids, or None."""
        assert need_size % self.page_size == 0, (need_size, self.page_size)
        blocks = self._take(need_size // self.page_size)
        if blocks is None or self.page_size == 1:
            return blocks
        offsets = torch.arange(self.page_size, device=self.device)
        return (blocks[:, None] * self.page_size + offsets).flatten()

    def alloc_extend(  # SGLang's signature
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Token ids for the new part of each sequence; a partly filled last block goes first."""
        size = self.page_size
        if num_new_pages is None:
            num_new_pages = self._new_blocks(prefix_lens_cpu, seq_lens_cpu)
        blocks = self._take(num_new_pages)
        if blocks is None:
            return None
        out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
        if self.device.type == "cpu":
            alloc_extend_naive(prefix_lens, seq_lens, last_loc, blocks, out, size, self.device)
        else:
            from sglang.srt.mem_cache.allocator.unified_sub_pool import (  # noqa: PLC0415
                alloc_extend_kernel,  # Triton: not on every CPU install
            )

            batch = len(prefix_lens)
            alloc_extend_kernel[(batch,)](
                prefix_lens, seq_lens, last_loc, blocks, out, next_power_of_2(batch), size
            )
        return out

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,  # noqa: ARG002  # SGLang's signature
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
    ) -> torch.Tensor | None:
        """One token id per sequence, in its last block or a new one."""
        out = last_loc.to(torch.int64) + 1
        starting = np.flatnonzero((seq_lens_cpu.numpy() - 1) % self.page_size == 0)
        if len(starting):
            blocks = self._take(len(starting))
            if blocks is None:
                return None
            out[upload(starting, self.device)] = blocks * self.page_size
        return out

    def free(self, free_index: torch.Tensor) -> None:
        """Give back the blocks of these token ids (whole blocks, each named by any of its ids).

        Reads them from the device: requests give theirs back through `free_blocks`.
        """
        if free_index is not None and free_index.numel():
            ids = free_index.detach().to("cpu", torch.int64).numpy()
            self.free_blocks(ids if self.page_size == 1 else np.unique(ids // self.page_size))

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """As `free`, of a block-aligned run of one request's row; its end may be in a block."""
        assert start_pos % self.page_size == 0, (start_pos, self.page_size)
        if free_index is not None:
            self.free(free_index[:: self.page_size])

    def free_blocks(self, blocks: IdArray) -> None:
        """Give blocks back, at once or at the end of the free group."""
        if self._freed_blocks is None:
            self.arena.free(NO_IDS, blocks)
        else:
            self._freed_blocks.append(blocks)

    def free_group_begin(self) -> None:
        """Hold frees until `free_group_end`, so that one result batch is one free."""
        assert self._freed_blocks is None, "free groups cannot be nested"
        self._freed_blocks = []

    def free_group_end(self) -> None:
        """Carry out the held frees."""
        held, self._freed_blocks = self._freed_blocks, None
        if held:
            self.arena.free(NO_IDS, np.concatenate(held))

    def flush_held_frees(self) -> None:
        """Carry out held frees without ending the group: an allocation needs the bytes now."""
        if self._freed_blocks:
            held, self._freed_blocks = self._freed_blocks, []
            self.arena.free(NO_IDS, np.concatenate(held))

    def clear(self) -> None:
        """Free everything; both of SGLang's clears may come, in any order."""
        self._freed_blocks = None
        self.arena.clear()

    # -- translation --

    @property
    def full_v2p_page_table(self) -> torch.Tensor:
        """The block id -> index table that SGLang's kernels gather through."""
        return self.arena.blocks.tensor

    def translate_kv_loc(
        self, loc: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Where attention reads: this rank's token ids -> physical rows, int64.

        Under DCP those are `id // dcp` of the ids that the rank holds.  Padding (negative) is row 0
        of the sink.
        """
        table, rows = self.arena.blocks.tensor, self.page_size // self._dcp_size
        return translate_token_ids(loc=loc, v2p=table, page_size=rows, out=out)

    def translate_write_loc(
        self,
        loc: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        out_width: int | None = None,
    ) -> torch.Tensor:
        """Where the forward writes: token ids -> physical rows, padded with 0 to `out_width`.

        Under DCP a token that another rank holds is written to the sink.
        """
        if out is None and out_width is None and self.page_size == 1:
            view = self.arena.block_ids.indices_of(loc)
            if view is not None:  # the usual decode step
                return view
        if out is None and out_width is not None:
            out = torch.empty(out_width, dtype=torch.int64, device=loc.device)
        return translate_token_ids(
            loc=loc,
            v2p=self.arena.blocks.tensor,
            page_size=self.page_size // self._dcp_size,
            dcp_size=self._dcp_size,
            dcp_rank=self._dcp_rank,
            out=out,
            out_width=out_width,
        )

    # -- compaction hooks --

    def flush_opportunistic(self) -> int:
        """Retreat the frontiers a little while nothing runs; returns the number of moves."""
        return self.arena.compact(COMPACTION_BYTES_PER_CALL)

    def prewarm_compaction(self) -> None:
        """SGLang calls this at start: compile and load what serving needs of ours."""
        self.arena.warm_up()
        for count in WARM_COUNTS:
            self.translate_write_loc(torch.zeros(count, dtype=torch.int64, device=self.device))

    def set_latest_forward_done_event(self, event: Any) -> None:
        """Moves run on the forward's stream order; no event is needed."""

    def set_inflight_forward(self, forward_done: Any, out_cache_loc_virtual: Any) -> None:
        """Moves run on the forward's stream order; no write set is needed."""

    def _move_gate_targets(self) -> Sequence[Any]:
        raise ValueError(
            "--radix-cache-backend kimi_k3 does not support PD disaggregation or HiCache yet: "
            "drop --disaggregation-mode / --enable-hierarchical-cache"
        )
