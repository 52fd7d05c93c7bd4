"""Lines of turns: what the ends that successive requests leave on one path say about each other.

A conversation's prompt extends the previous one, so of the ends on a path usually only the last is
resumed; and a line that came back after some time through some kind of end will do so again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.values import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radix.checkpoint import Checkpoint


def join(end: Checkpoint) -> Iterator[Checkpoint]:
    """A new end takes its place: it inherits the line, and stands behind the ends above it.

    Yields the checkpoints above whose facts changed, lost ones among them.
    """
    heir: Checkpoint | None = None
    for node in end.node.lineage():
        above = [c for c in (node.checkpoint, *reversed(node.lost)) if c is not None]
        for other in above:
            if other is end or other.kind not in ENDS:
                continue
            if heir is None or other.depth > heir.depth:
                heir = other
            if other.turn != end.turn:
                other.later += 1
                yield other
            elif not other.lost:
                other.twins += 1
                yield other
    if heir is not None:
        end.gap, end.line = heir.gap, heir.line


def leave(end: Checkpoint) -> Iterator[Checkpoint]:
    """An evicted end no longer stands behind those above, and the nearest may take its place.

    Yields the held checkpoints whose facts changed.
    """
    for node in end.node.lineage():
        other = node.checkpoint
        if other is None or other is end or other.kind not in ENDS:
            continue
        if other.turn != end.turn:
            other.later = max(0, other.later - 1)
        else:
            other.twins = max(0, other.twins - 1)
        if not other.later and not other.twins and end.used > other.used:
            other.used, other.gap, other.line = end.used, end.gap, end.line
        yield other
