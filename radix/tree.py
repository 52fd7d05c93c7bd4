"""The radix tree's structure: which tokens, blocks and checkpoints sit where. No policy.

A node is the edge that ends at depth `end`; its identity is that end, so splitting and merging
edges never invalidates a reference to a node that holds a checkpoint. A node is a ghost (tokens
only, `blocks` is None) or resident. Lengths are tokens and multiples of the block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radix.tokens import NO_IDS, IdArray, TokenArray, common_len

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from radix.checkpoint import Checkpoint
    from radix.values import Kind

LOST_PER_EDGE = 32  # evicted checkpoints, and refused depths, that one edge remembers


class Node:
    """One edge of the tree and the point where it ends."""

    __slots__ = (
        "blocks",
        "checkpoint",
        "children",
        "end",
        "holds",
        "lost",
        "parent",
        "pins",
        "refs",
        "refused",
        "resident_children",
        "seen",
        "tokens",
    )

    def __init__(self, tokens: TokenArray, blocks: IdArray | None, parent: Node | None) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self.parent = parent
        self.end: int = len(tokens) + (parent.end if parent is not None else 0)
        self.children: dict[bytes, Node] = {}
        self.resident_children = 0
        self.checkpoint: Checkpoint | None = None
        self.pins = 0  # pins that end here
        self.holds = 0  # of these, the ones that protect the checkpoint as well
        self.refs = 0  # pins that end here or below
        self.lost: tuple[Checkpoint, ...] = ()  # evicted ones on this edge, shallowest first
        self.refused: tuple[int, ...] = ()  # depths on this edge where a state found no memory
        self.seen = 0  # tick at which a ghost was last evidence

    @property
    def start(self) -> int:
        """Depth at which the edge begins."""
        return self.end - len(self.tokens)

    @property
    def resident(self) -> bool:
        """Whether the edge's KV is held."""
        return self.blocks is not None

    def lineage(self) -> Iterator[Node]:
        """The node itself and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a token sequence leads: whole nodes passed, then part of one more edge."""

    path: tuple[Node, ...]  # without the root
    partial: Node | None
    matched_len: int
    resident_len: int


def new_root() -> Node:
    """An empty tree."""
    return Node(NO_IDS, NO_IDS, None)


class Tree:
    """Operations on edges whose lengths are multiples of `block_size`; O(edges) each."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def _child(self, node: Node, tokens: TokenArray) -> tuple[Node | None, int]:
        """The child that shares at least a block with tokens[node.end:], and how many tokens."""
        key = self._key(tokens, node.end)
        child = node.children.get(key)
        if child is None:
            return None, 0
        shared = common_len(child.tokens, tokens[node.end :])
        return child, shared - shared % self.block_size

    def _key(self, tokens: TokenArray, depth: int) -> bytes:
        return tokens[depth : depth + self.block_size].tobytes()

    def walk(self, root: Node, tokens: TokenArray) -> Walk:
        """Follow `tokens` as far as they are known. Pure; one comparison per edge."""
        path: list[Node] = []
        node, partial, extra = root, None, 0
        while len(tokens) - node.end >= self.block_size:
            child, shared = self._child(node, tokens)
            if child is None:
                break
            if shared < len(child.tokens):
                partial, extra = child, shared
                break
            path.append(child)
            node = child
        resident = next((n.end for n in reversed(path) if n.resident), 0)
        matched = node.end + extra
        if partial is not None and partial.resident:
            resident = matched
        return Walk(tuple(path), partial, matched, resident)

    def ensure(self, start: Node, tokens: TokenArray, depth: int) -> Node:
        """The node that ends at `depth` on the way of `tokens`; missing edges are new ghosts.

        `start` must lie on that way at or above `depth`, and `depth` be a multiple of the block
        size within `tokens`.
        """
        node = start
        while node.end < depth:
            child, shared = self._child(node, tokens)
            if child is None:
                return self._attach(node, tokens[node.end : depth].copy())
            reach = min(node.end + shared, depth)
            node = child if reach == child.end else self.split(child, reach)
        return node

    def _attach(self, parent: Node, tokens: TokenArray) -> Node:
        child = Node(tokens, None, parent)
        parent.children[self._key(tokens, 0)] = child
        return child

    def split(self, node: Node, depth: int) -> Node:
        """Cut the edge at `depth`; the new upper node is returned, the lower keeps its identity."""
        cut = depth - node.start
        parent = node.parent
        assert parent is not None
        assert 0 < cut < len(node.tokens), (node.start, depth, node.end)
        blocks = node.blocks
        upper = Node(
            node.tokens[:cut].copy(),
            None if blocks is None else blocks[: cut // self.block_size].copy(),
            parent,
        )
        upper.refs = node.refs
        upper.seen = node.seen
        upper.lost = tuple(c for c in node.lost if c.depth <= depth)
        node.lost = node.lost[len(upper.lost) :]
        upper.refused = tuple(d for d in node.refused if d <= depth)
        node.refused = node.refused[len(upper.refused) :]
        parent.children[self._key(upper.tokens, 0)] = upper
        node.tokens = node.tokens[cut:].copy()
        if blocks is not None:
            node.blocks = blocks[cut // self.block_size :].copy()
            upper.resident_children = 1
        node.parent = upper
        upper.children[self._key(node.tokens, 0)] = node
        return upper

    def compress(self, node: Node) -> Node:
        """Merge a node that is no longer needed as a point into its only child; who is left.

        A point is needed if it is a root, holds a checkpoint, branches, is where a pin ends, or is
        where residency ends.
        """
        parent = node.parent
        if parent is None or node.checkpoint is not None or len(node.children) != 1 or node.pins:
            return node
        (child,) = node.children.values()
        if child.resident != node.resident:
            return node
        child.tokens = np.concatenate((node.tokens, child.tokens))
        if node.blocks is not None and child.blocks is not None:
            child.blocks = np.concatenate((node.blocks, child.blocks))
        child.lost = node.lost + child.lost
        child.refused = node.refused + child.refused
        child.parent = parent
        parent.children[self._key(child.tokens, 0)] = child
        node.parent = None
        node.children = {}
        return child

    def remove(self, leaf: Node) -> Node:
        """Cut off a ghost leaf; returns its parent."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children, (leaf.end, len(leaf.children))
        assert not leaf.resident, leaf.end
        del parent.children[self._key(leaf.tokens, 0)]
        leaf.parent = None
        return parent

    def blocks_between(self, end: Node, start: int, stop: int) -> IdArray:
        """Block ids of [start, stop) on the way to `end`."""
        size = self.block_size
        pieces = []
        for node in end.lineage():
            if node.end <= start:
                break
            if node.blocks is not None and node.start < stop:
                first = max(start - node.start, 0) // size
                last = (min(stop, node.end) - node.start) // size
                pieces.append(node.blocks[first:last])
        return np.concatenate(pieces[::-1]) if pieces else NO_IDS

    def adopt(self, end: Node, block_ids: IdArray, start: int) -> list[Node]:
        """Make the ghosts on the way to `end` resident; `block_ids` begin at depth `start`.

        Returns the nodes that were ghosts, deepest first.
        """
        fresh: list[Node] = []
        for node in end.lineage():
            if node.resident:
                break
            fresh.append(node)
        for node in reversed(fresh):
            first, last = ((d - start) // self.block_size for d in (node.start, node.end))
            self._make_resident(node, block_ids[first:last].copy())
        return fresh

    def _make_resident(self, node: Node, blocks: IdArray) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.resident, parent.end
        assert not node.resident, node.end
        assert len(blocks) * self.block_size == len(node.tokens), (len(blocks), len(node.tokens))
        node.blocks = blocks
        parent.resident_children += 1

    def make_ghost(self, node: Node) -> IdArray:
        """Take the blocks of a resident leaf without a checkpoint; its tokens stay."""
        parent, blocks = node.parent, node.blocks
        assert parent is not None
        assert blocks is not None, node.end
        assert node.checkpoint is None, node.end
        assert not node.resident_children, (node.end, node.resident_children)
        assert not node.refs, (node.end, node.refs)
        node.blocks = None
        parent.resident_children -= 1
        return blocks


def remember_refused(walk: Walk, depth: int) -> None:
    """Note, where `walk` ends, that a state wanted at `depth` found no memory."""
    if walk.matched_len < depth:
        return  # beyond what was computed, or what ghosts may remember
    node = walk.path[-1] if walk.partial is None else walk.partial
    held = node.checkpoint is not None and node.end == depth
    if not held and depth not in node.refused:
        node.refused = tuple(sorted((*node.refused, depth)))[-LOST_PER_EDGE:]


def fallback_len(node: Node) -> int:
    """Depth of the next shallower checkpoint on the way to `node`, or 0. O(edges between)."""
    above = node.parent
    while above is not None and above.parent is not None and above.checkpoint is None:
        above = above.parent
    return 0 if above is None else above.end


def only_len(node: Node) -> int:
    """Tokens whose KV would go with the checkpoint at `node`. O(edges between)."""
    if node.resident_children or node.refs:
        return 0
    total = len(node.tokens)
    above = node.parent
    while (
        above is not None
        and above.parent is not None
        and above.checkpoint is None
        and above.resident_children == 1
        and not above.refs
    ):
        total += len(above.tokens)
        above = above.parent
    return total


def newest_below(node: Node, kinds: Container[Kind]) -> Checkpoint | None:
    """The first checkpoint of one of `kinds` below `node`, along the newest resident edges."""
    while node.resident_children:
        node = next(child for child in reversed(node.children.values()) if child.resident)
        if node.checkpoint is not None and node.checkpoint.kind in kinds:
            return node.checkpoint
    return None


def nodes_below(root: Node) -> Iterator[Node]:
    """Every node under `root`, parents first, in insertion order."""
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))
