"""Lines of turns: what the ends that successive requests leave on one path say about each other.

A conversation's prompt extends the previous one, so of the ends on a path usually only the last is
resumed; and a line that came back after some time through some kind of end will do so again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.values import ENDS

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint

_NEAREST = 4  # ends above that are told of a new one in any case: it is what they fall back for


def join(end: Checkpoint) -> list[Checkpoint]:
    """A new end takes its place: it inherits the line and stands behind the ends above it.

    Returns the checkpoints above, lost ones among them, that are judged differently now.
    """
    changed: list[Checkpoint] = []
    heir: Checkpoint | None = None
    for node in end.node.lineage():
        for other in (node.checkpoint, *reversed(node.lost)):
            if other is None or other is end or other.kind not in ENDS:
                continue
            if heir is None or other.depth > heir.depth:
                heir = other
            before = other.standing
            if other.turn != end.turn:
                other.later += 1
            elif not other.lost:
                other.twins += 1
            if other.standing != before or (not other.lost and len(changed) < _NEAREST):
                changed.append(other)
    if heir is not None:
        end.gap, end.line = heir.gap, heir.line
        end.turns = heir.turns + (heir.turn != end.turn)
        if heir.turn == end.turn:
            end.answer_len = end.depth - heir.depth
    return changed


def leave(end: Checkpoint) -> list[Checkpoint]:
    """An evicted end no longer stands behind those above; the nearest may take its place.

    Returns the held checkpoints that are judged differently now.
    """
    changed: list[Checkpoint] = []
    for node in end.node.lineage():
        other = node.checkpoint
        if other is None or other.kind not in ENDS:
            continue
        before = other.standing
        if other.turn != end.turn:
            other.later = max(0, other.later - 1)
        else:
            other.twins = max(0, other.twins - 1)
        if other.standing == before:
            continue
        if other.standing == "last" and end.used > other.used:
            other.used, other.gap, other.line = end.used, end.gap, end.line
            other.answer_len = end.answer_len
        changed.append(other)
    return changed
