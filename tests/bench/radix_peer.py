"""SGLang 0.5.23's own tree, driven by the benchmark under the same verbs as ours.

`UnifiedRadixCache` with Full and Mamba components as its factory builds it. What the tree frees
goes nowhere instead of to its allocator, in the peer's favour; `Allocator` says what that would
take.
"""

import statistics
from array import array
from time import process_time

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix.sim.peers.sglang_arena import build


class Peer:
    """One tree; ids are made up, they are only carried."""

    def __init__(self) -> None:
        arena = build(
            total_tokens=4096, state_tokens=2, page_size=1, rows=1, context_tokens=64, core=None
        )
        self.tree = arena.tree
        self.core = type(self.tree.tree_core).__name__
        nowhere = lambda *_, **__: None  # noqa: E731
        for sink in (arena.allocator, self.tree.req_to_token_pool.mamba_allocator):
            sink.free = nowhere
        self.next_state = 0

    def row(self, hit: int, tokens: int) -> torch.Tensor:
        """What a request's row of token ids holds."""
        del hit
        return torch.arange(1, tokens + 1, dtype=torch.int32)

    def match(self, tokens: array):
        """As admission does: look up, then lock."""
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
        return found.device_prefix_len, self.tree.lock(found.last_device_node)

    def commit(self, held, tokens: array, row: torch.Tensor, depths: list[int]) -> None:
        """As a request's end does, with states at `depths`."""
        start, lock = held
        for depth in depths:
            self.next_state += 1
            values = row[:depth].to(dtype=torch.int64, copy=True)
            key = RadixKey(tokens[:depth], None)
            state = torch.tensor([self.next_state])
            self.tree.insert(
                InsertParams(key=key, value=values, mamba_value=state, prev_prefix_len=start)
            )
            start = depth
        self.tree.unlock(lock)

    def evict(self, tokens: int) -> None:
        """Make room for so many tokens."""
        done = self.tree.evict(EvictParams(num_tokens=tokens))
        assert done.num_tokens_evicted >= tokens, (done, tokens)

    def let_go(self, lock) -> None:
        """A request that goes no further."""
        self.tree.unlock(lock)

    def settle(self) -> None:
        """Ids go nowhere."""

    def states(self) -> int:
        """States held."""
        return self.tree.mamba_evictable_size() + self.tree.mamba_protected_size()


class Allocator:
    """One of SGLang's allocators at pages of one token, on CPU tensors, half of its ids taken."""

    def __init__(self, allocator, ids: int) -> None:
        self.allocator = allocator
        self.taken = allocator.alloc(ids // 2)

    @classmethod
    def unified(cls, ids: int) -> "Allocator":
        """The KV side of its unified pool."""
        arena = build(
            total_tokens=ids, state_tokens=2, page_size=1, rows=1, context_tokens=64, core=None
        )
        return cls(arena.allocator, ids)

    @classmethod
    def static(cls, ids: int) -> "Allocator":
        """The one it has without a unified pool."""
        return cls(TokenToKVPoolAllocator(ids, torch.bfloat16, "cpu", None, need_sort=False), ids)

    def seconds(self, tokens: int, repeats: int) -> float:
        """CPU seconds of taking so many ids and giving back the oldest; the median."""
        found = []
        for _ in range(repeats):
            start = process_time()
            new = self.allocator.alloc(tokens)
            self.allocator.free(self.taken[:tokens])
            found.append(process_time() - start)
            self.taken = torch.cat((self.taken[tokens:], new))
        return statistics.median(found)
