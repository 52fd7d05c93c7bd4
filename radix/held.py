"""The checkpoints in the tree, from the day each is put there until it is evicted.

Whatever happens to one is said here to all who judge it: the ends on its path (`radix.lines`), the
policy of eviction, and the logical clock of their uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix import lines
from radix.checkpoint import Checkpoint
from radix.matching import resumed
from radix.node import nearest_above
from radix.probation import Probation
from radix.tree import LOST_PER_EDGE
from radix.values import ENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from radix.eviction import EvictionPolicy
    from radix.node import Node
    from radix.values import Kind, Match, SlotId


class Held:
    """How many there are, which of them requests wait for, and what time it is.

    A checkpoint itself hangs at its node; the last few that an edge lost, at the edge.
    """

    def __init__(self, policy: EvictionPolicy, *, probation: int = 0) -> None:
        self.policy = policy
        self.count = 0
        self.surplus = 0  # of these, how many opportunistic ones are as good as free memory
        self.probation = Probation(probation)
        self.tick = 0  # logical time: one per consumption
        self.expected: dict[Checkpoint, None] = {}  # what waiting requests will resume from

    def put(self, node: Node, slot: SlotId, kind: Kind, turn: int) -> None:
        """Keep a state where a resident `node` ends that has none. O(edges above)."""
        depth = node.end
        assert node.resident, depth
        assert node.checkpoint is None, depth
        if node.lost and node.lost[-1].depth == depth:
            self.policy.forget(node.lost[-1])
            node.lost = node.lost[:-1]
        node.refused = tuple(refused for refused in node.refused if refused != depth)
        checkpoint = Checkpoint(node, slot, kind, turn=turn, tick=self.tick)
        node.checkpoint = checkpoint
        self.count += 1
        if kind in ENDS:
            self._judge(lines.join(checkpoint))
        above = nearest_above(node)
        if above is not None and above.turn == turn:
            checkpoint.in_answer = above.kind in ENDS or above.in_answer
        if checkpoint.unproven and not checkpoint.in_answer:
            self.probation.join(checkpoint)
        self._recount(checkpoint)
        self.policy.keep(checkpoint, self.tick)
        self._release()

    def lose(self, checkpoint: Checkpoint) -> None:
        """Give its state up; its edge remembers that there was one. O(edges above)."""
        node = checkpoint.node
        self.count -= 1
        node.checkpoint = None
        checkpoint.lost = True
        self._unexpect(checkpoint)
        self._recount(checkpoint)
        self.policy.lose(checkpoint, self.tick)
        known = (*node.lost, checkpoint)
        node.lost = known[-LOST_PER_EDGE:]
        for old in known[:-LOST_PER_EDGE]:
            self.policy.forget(old)
        if checkpoint.kind in ENDS:
            self._judge(lines.leave(checkpoint))
        self._release()

    def _release(self) -> None:
        """Nobody stays on probation for whom there is no room."""
        while (oldest := self.probation.release(self.count)) is not None:
            self.reconsider(oldest)

    def _judge(self, changed: Iterable[Checkpoint]) -> None:
        for checkpoint in changed:
            self.policy.update(checkpoint, self.tick)

    def reconsider(self, checkpoint: Checkpoint | None) -> None:
        """What surrounds it changed, or whether a pin protects it."""
        if checkpoint is not None:
            self._recount(checkpoint)
            self.policy.reconsider(checkpoint, self.tick)

    def _recount(self, checkpoint: Checkpoint) -> None:
        """Whether it is surplus and no pin protects it: the policy's first victims are such."""
        if checkpoint.lost or checkpoint.hits:
            self.probation.leave(checkpoint)
        counts = checkpoint.surplus and checkpoint.evictable
        self.surplus += counts - checkpoint.counted
        checkpoint.counted = counts

    def consume(self, checkpoint: Checkpoint | None) -> None:
        """A request resumed from it (None: from the start), and time goes on."""
        self.tick += 1
        if checkpoint is not None:
            self._unexpect(checkpoint)
            self._use(checkpoint)

    def miss(self, match: Match) -> None:
        """A request would have resumed from some that are lost: the last ones teach the policy."""
        for missed in match.missed:
            if missed.lost and (missed.standing == "last" or missed is match.missed[-1]):
                self._use(missed)

    def _use(self, checkpoint: Checkpoint) -> None:
        checkpoint.gap, checkpoint.line = self.tick - checkpoint.used, checkpoint.kind
        self.policy.consume(checkpoint, self.tick)
        self._recount(checkpoint)

    def expect(self, matches: Sequence[Match], ends: Sequence[Checkpoint]) -> None:
        """Requests wait for what these resume from, or soon for `ends`, and for nothing else."""
        found = (*map(resumed, matches), *ends)
        now = dict.fromkeys(one for one in found if one is not None and not one.lost)
        before, self.expected = self.expected, now
        for checkpoint in (*before, *now):
            if checkpoint.expected != (checkpoint in now):
                checkpoint.expected = not checkpoint.expected
                self.reconsider(checkpoint)

    def _unexpect(self, checkpoint: Checkpoint) -> None:
        if checkpoint.expected:
            checkpoint.expected = False
            del self.expected[checkpoint]

    def forget(self, node: Node) -> None:
        """Nothing will be heard again of what `node` holds and has lost: it holds nothing."""
        for checkpoint in (node.checkpoint, *node.lost):
            if checkpoint is not None:
                self.policy.forget(checkpoint)
        checkpoint, node.checkpoint = node.checkpoint, None
        if checkpoint is not None:
            self.count -= 1
            checkpoint.lost = True
            self._unexpect(checkpoint)
            self._recount(checkpoint)
