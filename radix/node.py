"""A node of the tree, and what can be read off the nodes around it.

A node is the edge that ends at depth `end`, and its identity is that end. It is a ghost (tokens
only, `blocks` is None) or resident. Lengths are tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radix.checkpoint import Checkpoint
    from radix.tokens import IdArray, TokenArray


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
        "ragged",
        "ragged_lens",
        "raw",
        "refs",
        "refused",
        "resident_children",
        "seen",
        "tokens",
    )

    def __init__(
        self,
        tokens: TokenArray,
        blocks: IdArray | None,
        parent: Node | None,
        *,
        ragged: bool = False,
    ) -> None:
        self.spell(tokens)
        self.ragged = ragged  # ends inside a block
        self.ragged_lens: dict[int, int] = {}  # ragged children by the length of their edge
        self.blocks = blocks
        self.parent = parent
        self.end: int = len(tokens) + (parent.end if parent is not None else 0)
        self.children: dict[bytes, Node] = {}
        self.resident_children = 0
        self.checkpoint: Checkpoint | None = None
        self.pins = 0  # pins that end here
        self.holds = 0  # of these, the ones that protect the checkpoint as well
        self.refs = 0  # pins that end here, and children with any
        self.lost: tuple[Checkpoint, ...] = ()  # evicted ones on this edge, shallowest first
        self.refused: tuple[int, ...] = ()  # depths on this edge where a state found no memory
        self.seen = 0  # tick at which a ghost was last evidence

    def spell(self, tokens: TokenArray) -> None:
        """Give the edge these tokens, copied; `raw` is their bytes."""
        self._read(tokens.tobytes())

    def prepend(self, upper: Node) -> None:
        """Begin the edge where `upper` begins: its tokens come first. One copy of both."""
        self._read(upper.raw + self.raw)

    def _read(self, raw: bytes) -> None:
        self.raw = raw
        self.tokens: TokenArray = np.frombuffer(raw, dtype=np.int64)

    @property
    def start(self) -> int:
        """Depth at which the edge begins."""
        return self.end - len(self.tokens)

    @property
    def resident(self) -> bool:
        """Whether the edge's KV is held."""
        return self.blocks is not None

    @property
    def guards(self) -> int:
        """What needs the edge's own blocks: edges below hold a ragged block's rows again."""
        return self.pins if self.ragged else self.refs

    def lineage(self) -> Iterator[Node]:
        """The node itself and its ancestors, the root last."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


def fallback_len(node: Node) -> int:
    """Depth of the next shallower checkpoint on the way to `node` that will stay, or 0.

    O(edges between).
    """
    above = node.parent
    while above is not None and above.parent is not None:
        if above.checkpoint is not None and not above.checkpoint.unproven:
            break
        above = above.parent
    return 0 if above is None else above.end


def nearest_above(node: Node) -> Checkpoint | None:
    """The next shallower checkpoint on the way to `node`. O(edges between)."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return None if above is None else above.checkpoint


def is_above(node: Node, other: Node) -> bool:
    """Whether `node` is on the way to `other`, or is it. O(edges between)."""
    at: Node | None = other
    while at is not None and at is not node and at.end >= node.end:
        at = at.parent
    return at is node


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


def nodes_below(root: Node) -> Iterator[Node]:
    """Every node under `root`, parents first, in insertion order."""
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children.values()))
