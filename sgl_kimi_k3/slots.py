"""SGLang's state slot allocator over the arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.mem_cache.unified_memory_pool import UnifiedMambaSlotAllocator

from mempool.storage import upload
from sgl_kimi_k3.arena import NO_IDS

if TYPE_CHECKING:
    import torch

    from sgl_kimi_k3.arena import Arena


class StateSlotAllocator(UnifiedMambaSlotAllocator):
    """`req_to_token_pool.mamba_allocator`: states by virtual id.

    `alloc_group_begin` takes nothing: stock reserves a state for every waiting request in each
    scheduling pass, which shrinks the very budget that pass admits by.
    """

    def __init__(self, arena: Arena, max_size: int) -> None:
        self._arena = arena
        self._max_size = max_size
        self._device = arena.device

    @property
    def virtual_to_physical(self) -> torch.Tensor:
        """The id -> index table, int64 [max id + 1]."""
        return self._arena.states.tensor

    def translate(self, virtual_ids: torch.Tensor) -> torch.Tensor:
        """Virtual state ids -> indices into the state views."""
        return self._arena.states.tensor[virtual_ids]

    def available_size(self) -> int:
        """`size` minus live states: the view of SGLang's leak check, not a capacity."""
        return self._max_size - self._arena.pool.live_states

    def schedulable_available_size(self) -> int:
        """How many states `alloc` can take now."""
        return self._arena.pool.fundable_states()

    @property
    def free_slots(self) -> torch.Tensor:
        """Ids that are not live, for SGLang's dump after a leak: int64, ascending."""
        free = np.flatnonzero(self._arena.pool.states.indices[1:] == 0) + 1
        return upload(free, self._device)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take `need_size` states: int64 ids [need_size], or None with nothing taken."""
        grant = self._arena.alloc(need_size, 0)
        if grant is None:
            return None
        if need_size == 1:  # all that SGLang asks for without tracking buffers
            return self._arena.slots.of(int(grant.states[0]))
        return upload(grant.states, self._device)

    def free(self, free_index: torch.Tensor) -> None:
        """Give states back."""
        self._arena.free(self._arena.slots.read(free_index), NO_IDS)

    def clear(self) -> None:
        """Free everything (SGLang clears both allocators together)."""
        self._arena.clear()

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Nothing is reserved ahead of admission."""

    def alloc_group_end(self) -> None:
        """Nothing was reserved."""

    def is_slot_allocated(self, slot: int) -> bool:
        """Whether the virtual id is live."""
        return bool(self._arena.pool.states.indices[int(slot)])

    def allocator_state_str(self) -> str:
        """One line for SGLang's reports."""
        return str(self._arena.pool.report())
