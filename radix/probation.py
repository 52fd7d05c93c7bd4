"""The youngest extra states, kept for a while although nobody has used them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint

_PROMPTS = 8  # whose extras it holds at least, while it is large enough for
_FEW = 2  # of each


class Probation:
    """First in, first out: at most one in `share` of all checkpoints, 0: none.

    Whether a new prefix is shared shows when its second prompt comes. Ends fill memory, so without
    a small part of their own the states that a first prompt leaves would be gone by then. As the
    queue in front of 2Q (A1in), W-TinyLFU (window) and S3-FIFO (small): what is used while here
    is judged like others from then on, what is not goes before them.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._members: dict[Checkpoint, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._members)

    def most(self, held: int) -> int:
        """How many may be here while so many are held in all."""
        return held // self._share if self._share else 0

    def few(self, held: int) -> int:
        """How many of them one prompt may bring while memory is short."""
        most = self.most(held)
        return min(most, max(_FEW, most // _PROMPTS))

    def join(self, checkpoint: Checkpoint) -> None:
        """As the youngest."""
        checkpoint.on_probation = True
        self._members[checkpoint] = None

    def leave(self, checkpoint: Checkpoint) -> None:
        """If it is here."""
        if checkpoint.on_probation:
            checkpoint.on_probation = False
            del self._members[checkpoint]

    def release(self, held: int) -> Checkpoint | None:
        """Let the oldest go if there are too many; None: there are not."""
        if len(self._members) <= self.most(held):
            return None
        oldest = next(iter(self._members))
        self.leave(oldest)
        return oldest
