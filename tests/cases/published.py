"""What a scheduler's tree holds, read back from the arena's bytes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from radix.node import nodes_below
from tests.plugin.memory import fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plugin.world import World


def published(world: World) -> list[int]:
    """Depths of all checkpoints, sorted; each must hold the fold of its own key."""
    depths = []
    for root in world.tree.cache.roots.values():
        for node in nodes_below(root):
            if node.checkpoint is None:
                continue
            key = np.concatenate([one.tokens for one in reversed(list(node.lineage()))])
            (index,) = world.arena.state_indices([node.checkpoint.slot])
            held = world.temporal[0, index].flatten()
            assert held.eq(fold(key)).all(), (node.end, node.checkpoint, held[:2])
            depths.append(node.end)
    return sorted(depths)


def memory(world: World) -> tuple[int, ...]:
    """What requests and the tree hold: states, blocks, checkpoints, pins, rows."""
    pool, tree = world.arena.pool, world.tree.cache
    rows = world.rows.size - len(world.rows.free_slots)
    return pool.live_states, pool.live_blocks, tree.states, len(tree.pins), rows


@contextmanager
def blocks_free(world: World, count: int, *, states: int = 1) -> Iterator[None]:
    """Within this, so many blocks are free beside so many states; what is cached stays."""
    arena = world.arena
    spare = arena.alloc(states, 0)
    taken = arena.alloc(0, arena.pool.fundable_blocks() - count)
    arena.free(spare.states, spare.blocks)
    world.reserved += len(taken.blocks)
    yield
    world.reserved -= len(taken.blocks)
    arena.free(taken.states, taken.blocks)
