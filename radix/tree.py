"""The radix tree's structure: which tokens, blocks and checkpoints sit where. No policy.

Splitting and merging edges never invalidates a reference to a node that holds a checkpoint.

A point inside a block is *ragged*. It stands only where a checkpoint stands or a pin ends (or as
a ghost leaf), and its edge lies within that one block. A block belongs to one edge: a ragged edge
has one, filled up to its point, and an edge that goes on from there has the same rows again in the
first of its own.

        640             960      1000   1024              2048
    aligned |----------------|                                      blocks 10..14
    ragged                   |--------|                             block 15, rows 0..39
    going on                          |----------------------|      blocks 15..31, all rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radix.node import Node
from radix.tokens import ITEM_BYTES, NO_IDS, IdArray, Key, TokenArray, common_len

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint

LOST_PER_EDGE = 32  # evicted checkpoints, and refused depths, that one edge remembers


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a token sequence leads: whole nodes passed, then part of one more edge."""

    path: tuple[Node, ...]  # without where it starts
    partial: Node | None
    matched_len: int
    resident_len: int


def new_root() -> Node:
    """An empty tree."""
    return Node(NO_IDS, NO_IDS, None)


class Tree:
    """Operations on edges, O(edges) each, and how many blocks and ghost tokens they hold."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = 0
        self.ghost_tokens = 0

    # -- finding ----------------------------------------------------------------------------

    def _child(self, node: Node, key: Key, limit: int) -> tuple[Node | None, int]:
        """The child on the way of key[node.end:limit], and how far they share it.

        That is up to a block boundary, or all of a ragged child. No child's key begins with
        another's, so there is at most one.
        """
        start, at = node.end, node.end * ITEM_BYTES
        room = self.block_size - start % self.block_size
        if limit - start >= room:
            child = node.children.get(key.raw[at : at + room * ITEM_BYTES])
            if child is not None:
                shared = min(len(child.tokens), limit - start)
                if not key.raw.startswith(child.raw, at):
                    shared = common_len(child.tokens, key.tokens[start:limit])
                return child, shared - (start + shared) % self.block_size
        for length in node.ragged_lens:
            if length <= limit - start:
                child = node.children.get(key.raw[at : at + length * ITEM_BYTES])
                if child is not None:
                    return child, length
        return None, 0

    def is_on_way(self, node: Node, key: Key) -> bool:
        """Whether `key` leads to `node`. A memcmp per edge."""
        return node.end <= len(key) and all(
            key.raw.startswith(above.raw, above.start * ITEM_BYTES) for above in node.lineage()
        )

    def walk(self, start: Node, key: Key, limit: int | None = None) -> Walk:
        """Follow `key`, up to `limit`, as far as it is known. Pure; one comparison per edge.

        `start`, the root or what a pin protects, must lie on its way.
        """
        path: list[Node] = []
        limit = len(key) if limit is None else limit
        node, partial, extra = start, None, 0
        while node.end < limit:
            child, shared = self._child(node, key, limit)
            if child is None:
                break
            if shared < len(child.tokens):
                partial, extra = child, shared
                break
            path.append(child)
            node = child
        resident = next((n.end for n in reversed(path) if n.resident), start.end)
        matched = node.end + extra
        if partial is not None and partial.resident:
            resident = matched
        return Walk(tuple(path), partial, matched, resident)

    # -- making points ----------------------------------------------------------------------

    def ensure(self, start: Node, key: Key, depth: int) -> Node:
        """The node that ends at `depth` on the way of `key`; missing edges are new ghosts.

        `start` must lie on that way, and `depth` within `key`. A ragged point made above resident
        edges must be given its block at once (`adopt`).
        """
        node = start
        while node.end < depth:
            child, shared = self._child(node, key, depth)
            if child is None:
                return self._attach(node, key.tokens[node.end : depth])
            reach = node.end + shared
            node = child if reach == child.end else self.split(child, reach)
        return node

    def point(self, end: Node, depth: int) -> Node:
        """The node that ends at `depth`, a block boundary, on the way to `end`. O(edges)."""
        node = next(above for above in end.lineage() if above.start < depth)
        return node if node.end == depth else self.split(node, depth)

    def _attach(self, parent: Node, tokens: TokenArray) -> Node:
        """New ghosts under `parent`: whole blocks first, then a ragged rest."""
        lost: tuple[Checkpoint, ...] = ()
        refused: tuple[int, ...] = ()
        if parent.ragged and not parent.resident and parent.parent is not None:
            # A ragged ghost that goes on is no point any more.
            tokens = np.concatenate((parent.tokens, tokens))
            lost, refused = parent.lost, parent.refused
            parent = self.remove(parent)
        self.ghost_tokens += len(tokens)
        end = parent.end + len(tokens)
        whole = max(0, len(tokens) - end % self.block_size)
        node = parent
        if whole:
            node = Node(tokens[:whole], None, parent)
            self._link(node)
            node.lost, node.refused = lost, refused
            lost, refused = (), ()
        if whole < len(tokens):
            node = self._insert(node, tokens[whole:])
            node.lost, node.refused = lost + node.lost, refused + node.refused
        return node

    def _insert(self, parent: Node, tokens: TokenArray) -> Node:
        """A ragged point between `parent` and those of its children that go through it."""
        point = Node(tokens, None, parent, ragged=True)
        through = [c for key, c in parent.children.items() if key.startswith(point.raw)]
        for child in through:
            self._unlink(child)
            child.spell(child.tokens[len(tokens) :])
            child.parent = point
            self._link(child)
            self.ghost_tokens -= 0 if child.resident else len(tokens)
            above = tuple(c for c in child.lost if c.depth <= point.end)
            child.lost = child.lost[len(above) :]
            point.lost += above
            low = tuple(depth for depth in child.refused if depth <= point.end)
            child.refused = child.refused[len(low) :]
            point.refused += low
            point.refs += child.refs > 0
            point.resident_children += child.resident
        parent.resident_children -= point.resident_children
        parent.refs -= point.refs - (point.refs > 0)
        self._link(point)
        return point

    def _dissolve(self, point: Node) -> None:
        """Take a ragged point off the way; those that go on from it take its tokens."""
        parent = point.parent
        assert parent is not None
        self._unlink(point)
        if point.blocks is None:
            self.ghost_tokens -= len(point.tokens)
        else:
            self.blocks -= len(point.blocks)
            parent.resident_children -= 1
        parent.resident_children += point.resident_children
        parent.refs += point.refs - (point.refs > 0)
        for child in point.children.values():
            child.prepend(point)
            child.parent = parent
            self._link(child)
            self.ghost_tokens += 0 if child.resident else len(point.tokens)
        newest = next(reversed(point.children.values()))
        newest.lost = point.lost + newest.lost
        newest.refused = point.refused + newest.refused
        point.parent, point.children = None, {}

    def _key(self, node: Node) -> bytes:
        return node.raw[: (self.block_size - node.start % self.block_size) * ITEM_BYTES]

    def _link(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.children[self._key(node)] = node
        if node.ragged:
            length = len(node.tokens)
            parent.ragged_lens[length] = parent.ragged_lens.get(length, 0) + 1

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node)]
        if node.ragged:
            length = len(node.tokens)
            parent.ragged_lens[length] -= 1
            if not parent.ragged_lens[length]:
                del parent.ragged_lens[length]

    def split(self, node: Node, depth: int) -> Node:
        """Cut the edge at `depth`, a block boundary.

        The new upper node is returned, the lower keeps its identity.
        """
        cut = depth - node.start
        parent = node.parent
        assert parent is not None
        assert 0 < cut < len(node.tokens), (node.start, depth, node.end)
        assert depth % self.block_size == 0, (depth, self.block_size)
        blocks, above = node.blocks, depth // self.block_size - node.start // self.block_size
        upper = Node(
            node.tokens[:cut],
            None if blocks is None else blocks[:above].copy(),
            parent,
        )
        upper.refs = int(node.refs > 0)
        upper.seen = node.seen
        upper.lost = tuple(c for c in node.lost if c.depth <= depth)
        node.lost = node.lost[len(upper.lost) :]
        upper.refused = tuple(d for d in node.refused if d <= depth)
        node.refused = node.refused[len(upper.refused) :]
        self._link(upper)  # in the place of `node`
        node.spell(node.tokens[cut:])
        if blocks is not None:
            node.blocks = blocks[above:].copy()
            upper.resident_children = 1
        node.parent = upper
        self._link(node)
        return upper

    def compress(self, node: Node) -> Node:
        """Undo a point that is not needed any more, by merging it into what follows; who is left.

        A point is needed if it is a root, holds a checkpoint, branches or begins a ragged edge, is
        a leaf, or is where a pin or residency ends. A ragged one is needed only for a checkpoint,
        a pin or as a leaf; if undone, its block is the caller's, still under `node.blocks`.
        """
        parent = node.parent
        if parent is None or node.checkpoint is not None or node.pins or not node.children:
            return node
        if node.ragged:
            self._dissolve(node)
            return self.compress(parent)
        child = next(iter(node.children.values()))
        if len(node.children) > 1 or child.resident != node.resident or child.ragged:
            return node
        child.prepend(node)
        if node.blocks is not None and child.blocks is not None:
            child.blocks = np.concatenate((node.blocks, child.blocks))
        child.lost = node.lost + child.lost
        child.refused = node.refused + child.refused
        child.parent = parent
        self._link(child)  # in the place of `node`
        node.parent = None
        node.children = {}
        return child

    def remove(self, leaf: Node) -> Node:
        """Cut off a ghost leaf; returns its parent."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children, (leaf.end, len(leaf.children))
        assert not leaf.resident, leaf.end
        self._unlink(leaf)
        self.ghost_tokens -= len(leaf.tokens)
        leaf.parent = None
        return parent

    # -- blocks -----------------------------------------------------------------------------

    def _covering(self, node: Node) -> tuple[int, int]:
        """The blocks of the sequence that the edge has a copy of, by number: [first, last)."""
        return node.start // self.block_size, -(-node.end // self.block_size)

    def blocks_between(self, end: Node, start: int, stop: int) -> IdArray:
        """Block ids that cover [start, stop) on the way to `end`, a partly filled last one too."""
        first, limit = start // self.block_size, -(-stop // self.block_size)
        pieces = []
        for node in end.lineage():
            if limit <= first:
                break
            begin, over = self._covering(node)
            if node.blocks is not None and begin < limit:
                over = min(over, limit)
                limit = max(begin, first)
                pieces.append(node.blocks[limit - begin : over - begin])
        return np.concatenate(pieces[::-1]) if pieces else NO_IDS

    def adopt(self, end: Node, block_ids: IdArray, start: int) -> list[Node]:
        """Make the ghosts on the way to `end` resident; `block_ids` begin with that of `start`.

        Returns the nodes that were ghosts, deepest first.
        """
        fresh: list[Node] = []
        for node in end.lineage():
            if node.resident:
                break
            fresh.append(node)
        for node in reversed(fresh):
            first, last = (number - start // self.block_size for number in self._covering(node))
            self._make_resident(node, block_ids[first:last].copy())
        return fresh

    def _make_resident(self, node: Node, blocks: IdArray) -> None:
        parent = node.parent
        first, last = self._covering(node)
        assert parent is not None
        assert parent.resident, parent.end
        assert not node.resident, node.end
        assert len(blocks) == last - first, (len(blocks), node.start, node.end)
        node.blocks = blocks
        parent.resident_children += 1
        self.blocks += len(blocks)
        self.ghost_tokens -= len(node.tokens)

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
        self.blocks -= len(blocks)
        self.ghost_tokens += len(node.tokens)
        return blocks

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks = self.ghost_tokens = 0


def remember_refused(walk: Walk, depth: int) -> None:
    """Note, where `walk` ends, that a state wanted at `depth` found no memory."""
    if walk.matched_len < depth or depth == 0:
        return  # beyond what was computed, or what ghosts may remember
    node = walk.path[-1] if walk.partial is None else walk.partial
    held = node.checkpoint is not None and node.end == depth
    if not held and depth not in node.refused:
        node.refused = tuple(sorted((*node.refused, depth)))[-LOST_PER_EDGE:]
