"""Prefill admission's budget over one arena, in tokens of KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sgl_kimi_k3.cache_adapter import KimiK3Cache
    from sgl_kimi_k3.pool_adapter import ArenaAllocator


class JointPrefillBudget(PrefillBudget):
    """What a pass may admit: free bytes plus evictable bytes of both kinds, counted once.

    Stock adds evictable KV to free KV and, in a second budget, evictable states to free states;
    both count the shared gap, and neither sees the other kind's evictable bytes.  SGLang charges a
    request's state to this budget as tokens (`mamba_slot_full_token_cost`), so one sum covers both.
    """

    allocator: ArenaAllocator
    tree_cache: KimiK3Cache

    def _available_and_evictable(self) -> int:
        return self.tree_cache.room.reclaimable_blocks() * self.page_size

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """How much of an unfinished prefill fits now; None: it waits, keeping what it has.

        Stock lets it take a whole chunk even when nothing is left, and dies in the allocation.
        """
        available = min(chunk_limit, int(self.remaining_current) - self.page_size)
        return available if available > 0 else None

    def hold_back(self, tokens: int) -> None:
        """Keep tokens that a request admitted earlier is still going to need."""
        self.total_offset += tokens
        self.current_offset += tokens


def answer_tokens(req: Req) -> int:
    """Tokens that the request may still write, as `PrefillAdder.add_one_req` counts them."""
    left: int = req.sampling_params.max_new_tokens - len(req.output_ids)
    return min(max(left, 0), CLIP_MAX_NEW_TOKENS)
