"""Small caches, and how to fill and empty them."""

import numpy as np

from mempool import Geometry, Pool
from radix import CacheConfig, PrefixCache, admit
from tests.oracle.world import World


def evict_states(world: World, count: int) -> None:
    """Make room for `count` states beyond those that fit now."""
    assert world.cache.evict(world.port.pool.fundable_states() + count, 0)
    world.check()


def evict_all(world: World) -> None:
    geometry = world.port.pool.geometry
    assert world.cache.evict(geometry.max_states, 0)
    assert world.cache.evict(0, geometry.max_blocks)
    world.check()


def tiny(total: int, state: int, block: int) -> tuple[PrefixCache, Pool]:
    """A cache over `total` bytes beside the sink; a block is a token."""
    pool = Pool(Geometry(total + state, state, block, 1, sink_bytes=state))
    return PrefixCache(pool, CacheConfig(block_size=1, grid=1, interval=0)), pool


def keep(cache: PrefixCache, pool: Pool, first: int, count: int) -> np.ndarray:
    """Cache `count` tokens with one state at their end."""
    tokens = np.arange(first, first + count)
    admit(cache, pool, tokens, None).finish(tokens, count)
    return tokens
