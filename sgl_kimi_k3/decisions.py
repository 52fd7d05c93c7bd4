"""A running hash of everything the arena decided, for `KIMI_K3_CHECK=1`.

Every tensor-parallel rank runs its own tree and pool and must take, move and free the same units in
the same order, or their tables part silently.  Each rank logs count and hash whenever it is idle;
equal counts must have equal hashes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool import Grant, IdArray, Move


class DecisionLog:
    """Feeds ids, in order, into one hash."""

    def __init__(self) -> None:
        self.count = 0  # grants and frees
        self._asked = 0
        self._hash = hashlib.blake2b(digest_size=8)

    def grant(self, grant: Grant) -> None:
        """Units taken, and what was moved for them."""
        self._add(b"take", grant.states, grant.blocks)
        self.moves(grant.moves)

    def moves(self, moves: tuple[Move, ...]) -> None:
        """Units moved, by physical index."""
        for move in moves:
            self._add(move.side.name.encode(), move.sources, move.targets)

    def free(self, states: IdArray, blocks: IdArray) -> None:
        """Units given back: evicted, or a request's own."""
        self._add(b"free", states, blocks)

    def changed(self) -> bool:
        """Whether anything was decided since the last call."""
        before, self._asked = self._asked, self.count
        return before != self.count

    def _add(self, what: bytes, *ids: IdArray) -> None:
        self.count += 1
        self._hash.update(what)
        for part in ids:
            self._hash.update(len(part).to_bytes(8, "little"))
            self._hash.update(part.tobytes())

    def __str__(self) -> str:
        return f"{self.count} decisions, hash {self._hash.hexdigest()}"
