"""Other orders of victims over the shipped retention: what the shipped one was compared with.

- `gdsf`: Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1): H = L + uses x cost / size, where L
  is the H of the last victim.
- `lhd`: hit density by class and age (Beckmann, Chen and Cidon, NSDI 2018), here times cost: the
  uses that keeping it promises, per byte and tick of memory they take.  Classes are kinds; ages are
  ticks since the last use, in half octaves.  The paper samples candidates, this looks at all.
- `consumed-lru`: `radix.ConsumedLru`.

Cost is the recompute from the next shallower checkpoint, size the bytes that would go.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from radix import ConsumedLru, Costs, Kind
from radix.node import fallback_len, only_len
from radix.sim.policies.ours import Ours
from radix.survival import BOUNDS, BUCKETS, bucket_of

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint
    from radix.sim.server import Setup
    from radix.survival import Table

_RELEARN = 128  # events between two looks of LHD at its ages
_DECAY = 0.9  # of what it counted before, at each
_KINDS = {kind: number for number, kind in enumerate(Kind)}
_WIDTHS: Table = np.diff(np.array(BOUNDS, dtype=np.float64))


class _Order(ABC):
    """A heap of values, corrected when an entry comes up; surplus opportunistic ones first."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._held: dict[Checkpoint, None] = {}
        self._heap: list[tuple[bool, float, int, Checkpoint]] = []
        self._serial = 0

    @abstractmethod
    def _value(self, checkpoint: Checkpoint) -> float:
        """What keeping it is worth now."""

    def _density(self, checkpoint: Checkpoint) -> float:
        """Cost per byte."""
        node = checkpoint.node
        freed = self._costs.state_bytes + only_len(node) * self._costs.token_bytes
        return self._costs.recompute(fallback_len(node), checkpoint.depth) / freed

    def _entry(self, checkpoint: Checkpoint) -> tuple[bool, float, int, Checkpoint]:
        self._serial += 1
        proven = not checkpoint.surplus
        return proven, self._value(checkpoint), self._serial, checkpoint

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """It is there."""
        self._held[checkpoint] = None
        self.update(checkpoint, now)

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """Something about it changed."""
        del now
        if checkpoint in self._held and checkpoint.evictable:
            heapq.heappush(self._heap, self._entry(checkpoint))

    def reconsider(self, checkpoint: Checkpoint, now: int) -> None:
        """So did what is around it."""
        self.update(checkpoint, now)

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """It was used."""
        checkpoint.used = now
        checkpoint.hits += 1
        self.update(checkpoint, now)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """It is gone."""
        del now
        self._held.pop(checkpoint, None)

    def forget(self, checkpoint: Checkpoint) -> None:
        """It is gone."""
        self._held.pop(checkpoint, None)

    def victim(self, now: int) -> Checkpoint | None:
        """The least value."""
        del now
        while self._heap:
            entry = self._heap[0]
            checkpoint = entry[3]
            if checkpoint in self._held and checkpoint.evictable:
                found = self._entry(checkpoint)
                if found[:2] <= entry[:2]:
                    return checkpoint
                heapq.heapreplace(self._heap, found)
            else:
                heapq.heappop(self._heap)
        return None


class Gdsf(_Order):
    """Values grow with the inflation at the last use."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._inflation = 0.0
        self._base: dict[Checkpoint, float] = {}  # the inflation when it was made or used

    def _value(self, checkpoint: Checkpoint) -> float:
        return self._base[checkpoint] + (1 + checkpoint.hits) * self._density(checkpoint)

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """It starts where the last victim stood."""
        self._base[checkpoint] = self._inflation
        super().keep(checkpoint, now)

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """It starts again from there."""
        if checkpoint in self._held:
            self._base[checkpoint] = self._inflation
        super().consume(checkpoint, now)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """The others need less from now on."""
        self._inflation = max(self._inflation, self._value(checkpoint))
        del self._base[checkpoint]
        super().lose(checkpoint, now)


class Lhd(_Order):
    """Values fall with age, so all are valued anew for a tick at its first victim."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._uses, self._ends = np.zeros((2, len(Kind), BUCKETS))  # by kind and age
        self._rate = np.ones((len(Kind), BUCKETS)) / np.arange(1, BUCKETS + 1)  # until it learns
        self._events = 0
        self._now = 0

    def _value(self, checkpoint: Checkpoint) -> float:
        age = bucket_of(max(self._now - checkpoint.used, 0))
        return float(self._rate[_KINDS[checkpoint.kind], age]) * self._density(checkpoint)

    def _event(self, table: Table, checkpoint: Checkpoint, now: int) -> None:
        if checkpoint in self._held:
            table[_KINDS[checkpoint.kind], bucket_of(now - checkpoint.used)] += 1
            self._events += 1
            if self._events % _RELEARN == 0:
                self._learn()

    def _learn(self) -> None:
        """Uses from an age on, by the ticks that those which get there have before them."""
        events = self._uses + self._ends
        later = events[:, ::-1].cumsum(axis=1)[:, ::-1]
        ticks = (later * _WIDTHS)[:, ::-1].cumsum(axis=1)[:, ::-1]
        uses = self._uses[:, ::-1].cumsum(axis=1)[:, ::-1]
        np.divide(uses, ticks, out=self._rate, where=ticks > 0)
        self._uses *= _DECAY
        self._ends *= _DECAY

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """A use ends a wait."""
        self._event(self._uses, checkpoint, now)
        super().consume(checkpoint, now)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """So does an eviction."""
        self._event(self._ends, checkpoint, now)
        super().lose(checkpoint, now)

    def victim(self, now: int) -> Checkpoint | None:
        """O(n) once a tick."""
        if now != self._now:
            self._now = now
            self._heap = [self._entry(one) for one in self._held if one.evictable]
            heapq.heapify(self._heap)
        return super().victim(now)


def make_gdsf(setup: Setup) -> Ours:
    """`ours` with GDSF's order."""
    return Ours(setup, Gdsf(setup.model.token_costs))


def make_lhd(setup: Setup) -> Ours:
    """`ours` with LHD's order."""
    return Ours(setup, Lhd(setup.model.token_costs))


def make_consumed_lru(setup: Setup) -> Ours:
    """`ours` with the plainest order."""
    return Ours(setup, ConsumedLru())
