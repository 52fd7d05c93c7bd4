"""A checkpoint's bookkeeping: the facts an eviction policy may judge it by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.values import Kind

if TYPE_CHECKING:
    from radix.node import Node
    from radix.values import SlotId


class Checkpoint:
    """One immutable state at `depth`, and how it has been used. Times are ticks.

    Once evicted (`lost`) its `slot` means nothing, and the edge that covers `depth` remembers it.
    What `radix.lines` keeps: `line` is the kind of end that the request before the last resumed
    from, `gap` how long after its making or last use; `later` counts the held ends of later turns
    below, `twins` those of the same turn.
    """

    __slots__ = (
        "answer_len",
        "counted",
        "created",
        "depth",
        "expected",
        "gap",
        "hits",
        "in_answer",
        "kind",
        "later",
        "line",
        "lost",
        "node",
        "note",
        "on_probation",
        "slot",
        "turn",
        "turns",
        "twins",
        "used",
    )

    def __init__(self, node: Node, slot: SlotId, kind: Kind, *, turn: int, tick: int) -> None:
        self.node = node
        self.depth = node.end
        self.slot = slot
        self.kind = kind
        self.turn = turn  # which request made it
        self.created = tick
        self.used = tick  # made, or last consumed
        self.hits = 0
        self.gap = 0  # 0: unknown
        self.line: Kind | None = None
        self.turns = 0  # of its line, before this one
        self.answer_len = 0  # tokens since the end of the same turn's prompt
        self.later = 0
        self.twins = 0
        self.lost = False
        self.expected = False  # a request that waits will resume here
        self.counted = False  # among those that `radix.held` says are as good as free
        self.on_probation = False  # `radix.probation`
        self.in_answer = False  # behind the end of the same turn's prompt
        self.note: object = None  # the policy's

    @property
    def evictable(self) -> bool:
        """Whether the tree has it and no pin protects it."""
        return not self.lost and not self.node.holds

    @property
    def unproven(self) -> bool:
        """An extra that is neither used nor waited for: no reason yet to keep it."""
        return self.kind is Kind.OPPORTUNISTIC and not self.hits and not self.expected

    @property
    def surplus(self) -> bool:
        """Unproven for long enough: as good as free memory, the first to go."""
        return self.unproven and not self.on_probation

    @property
    def standing(self) -> str:
        """What stands behind an end on its path: "last", a "twin", or later turns: "superseded"."""
        return "superseded" if self.later else "twin" if self.twins else "last"
