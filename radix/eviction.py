"""The order of victims: what a policy is told, and the plainest one.

Evicting a checkpoint frees its state, and with it the KV that serves no other checkpoint. So KV
that no checkpoint covers never waits for eviction, and a victim is always a checkpoint.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint

VOID_ENTRIES_MIN = 1024  # a heap is swept of void entries once they outnumber the others by so many


class EvictionPolicy(Protocol):
    """Orders the evictable checkpoints. Deterministic, O(log n) a call; `now` never goes back."""

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """The tree holds it from now on."""
        ...

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """Its facts changed: what stands behind it, or when it was used."""
        ...

    def reconsider(self, checkpoint: Checkpoint, now: int) -> None:
        """What surrounds it changed, or whether it is evictable."""
        ...

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """A request resumed from it, or, if it is lost, would have."""
        ...

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """It was evicted; its tokens are still known."""
        ...

    def forget(self, checkpoint: Checkpoint) -> None:
        """Nothing will be heard of it again."""
        ...

    def victim(self, now: int) -> Checkpoint | None:
        """The next one to go, None if nothing is evictable."""
        ...


class ConsumedLru:
    """Surplus opportunistic checkpoints first, then the least recently made or consumed.

    Only the checkpoint that a request resumes from is refreshed, never its path.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, Checkpoint]] = []
        self._serial = 0
        self._limit = VOID_ENTRIES_MIN

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n)."""
        self.update(checkpoint, now)

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n); the entry it had becomes void."""
        del now
        self._serial += 1
        checkpoint.note = self._serial
        if checkpoint.evictable:
            entry = (not checkpoint.surplus, checkpoint.used, self._serial, checkpoint)
            heapq.heappush(self._heap, entry)
            if len(self._heap) > self._limit:
                self._heap = [entry for entry in self._heap if entry[3].note == entry[2]]
                heapq.heapify(self._heap)
                self._limit = 2 * len(self._heap) + VOID_ENTRIES_MIN

    def reconsider(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n)."""
        self.update(checkpoint, now)

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n)."""
        checkpoint.used = now
        checkpoint.hits += 1
        self.update(checkpoint, now)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        del now
        checkpoint.note = None

    def forget(self, checkpoint: Checkpoint) -> None:
        """O(1)."""
        checkpoint.note = None

    def victim(self, now: int) -> Checkpoint | None:
        """Amortised O(log n)."""
        del now
        while self._heap:
            _, _, serial, checkpoint = self._heap[0]
            if checkpoint.note == serial:
                return checkpoint
            heapq.heappop(self._heap)
        return None
