"""How the tree grows: what a request computed becomes edges, and its states stand on points."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radix.held import Held
    from radix.node import Node
    from radix.report import Counters
    from radix.tokens import IdArray, Key
    from radix.tree import Tree
    from radix.values import Offer, Pin


class Growth:
    """Puts KV and states of checked offers into the tree."""

    def __init__(self, tree: Tree, held: Held, counters: Counters) -> None:
        self._tree = tree
        self._held = held
        self._counters = counters

    def grow(
        self,
        root: Node,
        pin: Pin,
        key: Key,
        block_ids: IdArray,
        taken: Sequence[Offer],
        kept: int,
    ) -> tuple[Node, list[int]]:
        """Hold the KV up to `kept` and the states `taken`, shallowest first.

        `block_ids` are those of the whole blocks of `key` from the one in which pin.depth lies, and
        `root` is its namespace's. Returns the node that ends at `kept` and the tails that are not
        needed. O(edges added, split or merged).
        """
        tree, size, unused = self._tree, self._tree.block_size, list[int]()
        whole = tree.ensure(pin.node, key, kept - kept % size)
        fresh = tree.adopt(whole, block_ids, pin.depth)
        at = pin.node
        for offer in taken:
            if offer.depth <= whole.end and offer.depth % size == 0:
                at = tree.point(whole, offer.depth)
            else:
                at = tree.ensure(at if at.end <= offer.depth else root, key, offer.depth)
            unused += self._place(at, pin, offer)
        end = whole if whole.end == kept else tree.ensure(at, key, kept)
        for node in fresh:
            tree.compress(node)
        return end, unused

    def _place(self, node: Node, pin: Pin, offer: Offer) -> list[int]:
        """Put an offered state where `node` ends; its tail if that is not needed."""
        depth, slot, kind, tail = offer
        unused = [] if tail is None else [tail]
        if unused and not node.resident:
            self._tree.adopt(node, np.array(unused, dtype=np.int64), depth)
            unused = []
        self._held.put(node, slot, kind, pin.turn)
        self._counters.taken[kind] += 1
        return unused
