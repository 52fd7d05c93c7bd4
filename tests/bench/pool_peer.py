"""SGLang 0.5.23's own unified pool on CPU tensors, driven by the benchmark.

Its two `MultiEndedAllocator`s are built by its own factory and used as they are, but for trace
regions, which are a null context in the peer's favour.
"""

import contextlib
from time import thread_time

import torch
from sglang.srt.mem_cache.allocator import unified_mamba, unified_sub_pool
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs

from mempool import Geometry
from radix.sim.peers.sglang_arena import layout
from tests.bench.pool_ops import PAGE, STATE_BYTES, TOKEN_BYTES


class Peer:
    """Both ends of SGLang's arena; units are handles as in `pool_ops`."""

    def __init__(self, geometry: Geometry) -> None:
        for module in (unified_sub_pool, unified_mamba):
            module.record_function = lambda _name: contextlib.nullcontext()
        context()
        bundle = init_unified_mamba_pools(**sizes(geometry))
        allocator = bundle.token_to_kv_pool_allocator
        self.kv, self.state = allocator.full_attn_allocator, allocator.mamba_allocator
        assert (self.kv.entry_bytes, self.state.entry_bytes) == (TOKEN_BYTES, STATE_BYTES)
        assert allocator.unified_buffer.total_bytes == geometry.total_bytes
        self.moved_bytes = 0
        self.spent = 0.0  # CPU seconds of the last call, handles apart
        self.units: dict[int, list[torch.Tensor]] = {}
        for end in (self.kv, self.state):
            self._watch(end)

    def _watch(self, end) -> None:
        move = end._move_pages

        def moving(sources, targets):
            self.moved_bytes += int(sources.numel()) * end.entry_bytes_per_page
            move(sources, targets)

        end._move_pages = moving

    def alloc(self, handle: int, states: int, blocks: int) -> bool:
        """States, then blocks; what was taken goes back if the rest does not fit."""
        slots = pages = torch.empty(0, dtype=torch.int64)
        start = thread_time()
        if states:
            slots = self.state.alloc(states)
        if blocks and slots is not None:
            pages = self.kv.alloc(blocks * PAGE)
            if pages is None and states:
                self.state.free(slots)
        self.spent = thread_time() - start
        if slots is None or pages is None:
            return False
        self.units[handle] = [slots, pages]
        return True

    def free(self, handle: int, states: int, blocks: int) -> None:
        """By page-aligned segments, the way SGLang's own release does it without `unique`."""
        slots, pages = self.units[handle]
        gone = slots[:states], pages[: blocks * PAGE]
        start = thread_time()
        if states:
            self.state.free(gone[0])
        if blocks:
            self.kv.free_segment(gone[1], start_pos=0)
        self.spent = thread_time() - start
        self.units[handle] = [slots[states:], pages[blocks * PAGE :]]

    def live_bytes(self) -> int:
        return (
            self.state.live_page_count * STATE_BYTES + self.kv.live_page_count * PAGE * TOKEN_BYTES
        )


def context(page: int = PAGE) -> None:
    """SGLang's process-wide configuration."""
    reset_context()
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        page_size=page,
        chunked_prefill_size=8192,
        mamba_radix_cache_strategy="extra_buffer",
    )
    args._mamba_cache_chunk_size = PAGE  # or the "dummy" model's config is looked up online
    publish(args, role="scheduler")


def sizes(geometry: Geometry) -> dict:
    """One layer of each kind, whose entries are 32 bytes a token and 65,024 bytes a state."""
    return layout(STATE_BYTES // TOKEN_BYTES) | {
        "page_size": geometry.block_size,
        "model_context_len": 1024,
        "extra_max_context_len": 4,
        "max_total_num_tokens": geometry.total_bytes // TOKEN_BYTES,
        "max_num_reqs": 8,
        "unified_total_bytes": geometry.total_bytes,
    }
