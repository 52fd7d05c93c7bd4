"""Room for both kinds of memory: what is free, what eviction could free, and taking it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from radix import PrefixCache
    from radix.ports import GrantLike
    from sgl_kimi_k3.arena import Arena


class Room:
    """One arena's room, jointly over states and blocks.

    Args:
        cache: the tree, whose order of victims decides what goes.
        arena: the memory.
        flush_held_frees: frees what the scheduler still holds in a free group.
    """

    def __init__(
        self, cache: PrefixCache, arena: Arena, flush_held_frees: Callable[[], None]
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._flush_held_frees = flush_held_frees

    def make(self, *, states: int, blocks: int) -> bool:
        """Evict until the arena fits both; False, with nothing evicted, if it cannot."""
        self._flush_held_frees()
        return self._cache.evict(states, blocks)

    def take(self, *, states: int, blocks: int) -> GrantLike | None:
        """Evict until both fit and take them; None, with nothing evicted, if they cannot."""
        self._flush_held_frees()
        return self._cache.acquire(states, blocks)

    def _kept(self) -> tuple[int, int]:
        """States and blocks that would be left if everything evictable were evicted."""
        pool = self._arena.pool
        return (
            pool.live_states + pool.retired_states - self._cache.evictable_states,
            pool.live_blocks + pool.retired_blocks - self._cache.evictable_blocks,
        )

    def reclaimable_blocks(self, spared_states: int = 0, spared_blocks: int = 0) -> int:
        """Blocks that fit if everything evictable but the spared were evicted."""
        geometry, (states, blocks) = self._arena.geometry, self._kept()
        top = geometry.state_end(states + spared_states)
        return geometry.blocks_above(top) - blocks - spared_blocks

    def reclaimable_states(self) -> int:
        """States that fit if everything evictable were evicted."""
        geometry, (states, blocks) = self._arena.geometry, self._kept()
        return geometry.states_below(geometry.block_start(blocks)) - states
