"""The order of victims. A policy sees only checkpoints that may be evicted.

Evicting a checkpoint frees its state, and with it the KV that serves no other checkpoint.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

from radix.values import Kind

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint


VOID_ENTRIES_MIN = 1024  # a heap is swept of void entries once they outnumber the others by so many


class EvictionPolicy(Protocol):
    """Keeps the evictable checkpoints in some order. Deterministic; O(log n) a call."""

    def insert(self, checkpoint: Checkpoint) -> None:
        """It became evictable: newly kept, or its last pin is gone."""
        ...

    def remove(self, checkpoint: Checkpoint) -> None:
        """It is no longer evictable: pinned or evicted."""
        ...

    def update(self, checkpoint: Checkpoint) -> None:
        """An evictable checkpoint's facts or surroundings changed."""
        ...

    def victim(self) -> Checkpoint | None:
        """The next one to go; it stays in the order until it is removed."""
        ...


class ConsumedLru:
    """Opportunistic checkpoints, then superseded ends, then the least recently consumed.

    >>> ConsumedLru().victim() is None
    True
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int, Checkpoint]] = []
        self._entries = 0
        self._limit = VOID_ENTRIES_MIN

    def insert(self, checkpoint: Checkpoint) -> None:
        """O(log n)."""
        checkpoint.stamp += 1
        self._entries += 1
        rank = 0 if checkpoint.kind is Kind.OPPORTUNISTIC else 1 if checkpoint.superseded else 2
        entry = (rank, checkpoint.used, self._entries, checkpoint.stamp, checkpoint)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [one for one in self._heap if one[3] == one[4].stamp]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + VOID_ENTRIES_MIN

    def remove(self, checkpoint: Checkpoint) -> None:
        """O(1): the entry is left behind, void."""
        checkpoint.stamp += 1

    update = insert

    def victim(self) -> Checkpoint | None:
        """Amortised O(log n)."""
        while self._heap:
            *_, stamp, checkpoint = self._heap[0]
            if stamp == checkpoint.stamp:
                return checkpoint
            heapq.heappop(self._heap)
        return None
