"""Ghosts: tokens without bytes, the evidence for a second sight; bounded, the oldest go first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from radix.eviction import VOID_ENTRIES_MIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from radix.checkpoint import Checkpoint
    from radix.node import Node
    from radix.tokens import Key
    from radix.tree import Tree


class Ghosts:
    """Forgets the least recently seen leaves when ghost tokens pass `bound` (R8).

    `forget` is called with every evicted checkpoint that such a leaf still knew.
    """

    def __init__(self, tree: Tree, bound: int, forget: Callable[[Checkpoint], None]) -> None:
        self._tree = tree
        self._forget = forget
        self._bound = bound
        self._leaves: list[tuple[int, int, Node]] = []  # oldest first; void entries stay
        self._entries = 0
        self._limit = VOID_ENTRIES_MIN

    def remember(self, end: Node, key: Key, known: int, seen: int) -> None:
        """Keep the tokens past `end` as a ghost; up to depth `known` the tree has them already."""
        up_to = min(len(key), end.end + self._bound)
        up_to -= up_to % self._tree.block_size
        if up_to <= known:
            return
        leaf = self._tree.ensure(end, key, up_to)
        self.queue(leaf, seen)
        if leaf.parent is not None and not leaf.parent.resident:
            self._tree.compress(leaf.parent)

    def queue(self, node: Node, seen: int) -> None:
        """Note a ghost that may be forgotten once it is a leaf, last seen at that tick."""
        if not node.children:
            node.seen = seen
            self._entries += 1
            heapq.heappush(self._leaves, (node.seen, self._entries, node))
            if len(self._leaves) > self._limit:
                self._leaves = [one for one in self._leaves if _is_current(one[2], one[0])]
                heapq.heapify(self._leaves)
                self._limit = 2 * len(self._leaves) + VOID_ENTRIES_MIN

    def trim(self) -> list[Node]:
        """Forget, leaf by leaf, down to the bound; the roots that were left without any token."""
        bare: list[Node] = []
        while self._tree.ghost_tokens > self._bound:
            seen, _, leaf = heapq.heappop(self._leaves)
            if not _is_current(leaf, seen):
                continue
            for checkpoint in leaf.lost:
                self._forget(checkpoint)
            parent = self._tree.remove(leaf)
            if parent.resident or parent.children:
                self._tree.compress(parent)
            else:
                self.queue(parent, parent.seen)
            if parent.parent is None and not parent.children:
                bare.append(parent)
        return bare

    def clear(self) -> None:
        """Forget all."""
        self._leaves.clear()


def _is_current(leaf: Node, seen: int) -> bool:
    return not (leaf.parent is None or leaf.resident or leaf.children or leaf.seen != seen)
