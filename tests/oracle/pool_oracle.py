"""A naive arena: every byte is painted with who lives there. Shares no code with `mempool`.

The oracle knows sizes and where byte 0 is, nothing of ends, tables, holes or frontiers. It keeps,
per byte, the tenant now (kind, id) and the kind that owned it last.
"""

from enum import Enum

import numpy as np

STATE, BLOCK = "state", "block"


class PaintedArena:
    """Bytes `[0, total)`; the first `sink` are never anyone's."""

    def __init__(self, total: int, unit: dict[str, int], sink: int) -> None:
        self.total, self.unit, self.sink = total, unit, sink
        self.tenant: list[tuple[str, int] | None] = [None] * total
        self.last_kind: list[str | None] = [None] * total
        self.index_of: dict[tuple[str, int], int] = {}
        self.fixed: dict[tuple[str, int], int] = {}
        self.count = {STATE: 0, BLOCK: 0}
        # All indices of a kind outside the sink, nearest the own end first.
        inside = {k: [i for i in range(total // n) if i * n >= sink] for k, n in unit.items()}
        self.slots = {STATE: inside[STATE], BLOCK: inside[BLOCK][::-1]}

    def span(self, kind: str, index: int) -> range:
        return range(index * self.unit[kind], (index + 1) * self.unit[kind])

    def was_other(self, kind: str, index: int) -> bool:
        """Whether a byte of the unit last belonged to the other kind."""
        return any(self.last_kind[b] not in (None, kind) for b in self.span(kind, index))

    def zero(self, kind: str, index: int) -> None:
        """The unit is zeroed before its next owner has it: nobody's, and nobody may be in it."""
        span = self.span(kind, index)
        assert span.start >= self.sink, f"{kind} index {index} in the sink is zeroed"
        for byte in span:
            assert self.tenant[byte] is None, f"a live byte of {self.tenant[byte]} is zeroed"
            self.last_kind[byte] = None

    def enter(self, kind: str, one: int, index: int) -> None:
        span = self.span(kind, index)
        assert (kind, one) not in self.index_of, f"{kind} {one} is handed out twice"
        assert span.start >= self.sink, f"{kind} {one} lies in the sink"
        assert span.stop <= self.total, f"{kind} {one} passes the end"
        taken = {self.tenant[b] for b in span} - {None}
        assert not taken, f"{kind} {one} overlaps {taken}"
        for byte in span:
            self.tenant[byte] = (kind, one)
            self.last_kind[byte] = kind
        self.index_of[kind, one] = index
        self.count[kind] += 1

    def leave(self, kind: str, one: int) -> None:
        index = self.index_of.pop((kind, one))
        self.count[kind] -= 1
        self.fixed.pop((kind, one), None)
        for byte in self.span(kind, index):
            assert self.tenant[byte] == (kind, one)
            self.tenant[byte] = None

    def move(self, kind: str, sources: list[int], targets: list[int]) -> None:
        """Apply one batch of moves; the whole batch is one copy without order."""
        assert len(sources) == len(targets) == len(set(sources) | set(targets)) // 2
        for source, target in zip(sources, targets, strict=True):
            owner = self.tenant[source * self.unit[kind]]
            assert owner is not None, f"{kind} {source} is moved but empty"
            assert owner[0] == kind
            assert not self.fixed.get(owner), f"{owner} is fixed and moved"
            count = self.fixed.pop(owner, 0)
            self.leave(*owner)
            self.enter(*owner, target)
            self.fixed[owner] = count

    def fix(self, kind: str, one: int, by: int) -> None:
        self.fixed[kind, one] = self.fixed.get((kind, one), 0) + by

    def ids(self, kind: str) -> list[int]:
        return sorted(one for k, one in self.index_of if k == kind)

    def live_bytes(self) -> int:
        return sum(owner is not None for owner in self.tenant)

    def room(self, demand: dict[str, int]) -> bool:
        """Whether some arrangement that leaves fixed units in place holds the demand as well.

        Every kind keeps to its own end, so what matters is how far each must reach.
        """
        reach = {STATE: self.sink, BLOCK: self.total}
        for kind, slots in self.slots.items():
            fixed = [
                slots.index(self.index_of[o]) for o, n in self.fixed.items() if n and o[0] == kind
            ]
            count = max([self.count[kind] + demand[kind], *(n + 1 for n in fixed)])
            if count > len(slots):
                return False
            if count:
                span = self.span(kind, slots[count - 1])
                reach[kind] = span.stop if kind == STATE else span.start
        return reach[STATE] <= reach[BLOCK]


def snapshot(thing: object) -> object:
    """Everything a pool-like object holds, comparable by ==; counters left out."""
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, bytearray):
        return bytes(thing)
    if isinstance(thing, (int, str, bytes, Enum, type(None))):
        return thing
    if isinstance(thing, (tuple, list)) or type(thing).__name__ == "deque":
        return [snapshot(one) for one in thing]
    if isinstance(thing, dict):
        return {name: snapshot(one) for name, one in thing.items()}
    names = getattr(type(thing), "__slots__", None) or vars(thing)
    keep = [name for name in names if name not in ("_counters", "_scratch")]
    return {name: snapshot(getattr(thing, name)) for name in keep}
