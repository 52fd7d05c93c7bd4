"""A checkpoint's bookkeeping: the facts an eviction policy may judge it by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix.tree import Node
    from radix.values import Kind, SlotId


class Checkpoint:
    """One immutable state at the end of `node`, and how it has been used.

    `used` is the tick of its creation or last consumption, `hits` how often it was consumed.
    `superseded` says that a later turn of the same path has an end of its own.
    """

    __slots__ = ("created", "hits", "kind", "node", "slot", "stamp", "superseded", "used")

    def __init__(self, node: Node, slot: SlotId, kind: Kind, tick: int) -> None:
        self.node = node
        self.slot = slot
        self.kind = kind
        self.created = tick
        self.used = tick
        self.hits = 0
        self.superseded = False
        self.stamp = 0  # the policy's: entries with an older stamp are void
