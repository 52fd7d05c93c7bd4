"""The shipped policy: the least expected recompute per byte and tick goes first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from radix.node import fallback_len, is_above, nearest_above, only_len
from radix.ranking import NOTHING, Ranking
from radix.survival import Survival
from radix.values import ENDS, Costs, Kind

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint

_RELEARN = 128  # ticks between two looks at what was learned
_LOOKS = 1024  # shared by all: where few are held, more of them are judged again each tick
_OCTAVES = 1.5  # width of a class of gaps, and of lengths
_CLASSES = 7  # of either
_SHORT_LEN = 512  # tokens; shorter paths are of one class
_LEARNING = 0.01  # weight of one request in the share of lost ends
_HITS = 3  # more are told apart no further
_SURE = 1.0  # uses per tick of what a waiting request will resume from
_MAYBE = 0.5  # of what is on probation: above all that is learned

# How often a class is used before anything is learned, beside ends that stand last on their path.
_STANDINGS = {"last": 1.0, "twin": 0.2, "superseded": 0.02}
_PLACES = {Kind.INTERVAL: 0.1, Kind.BOUNDARY: 0.5, Kind.OPPORTUNISTIC: 0.1}


class ExpectedLoss:
    """Score = promised uses per tick x recompute that each would cost / bytes freed.

    The promise is learned (`Survival`) by class: what kind of checkpoint, whether later ends stand
    behind it, whether its line of turns came back through its kind of end (clients that drop the
    model's thinking never resume a turn's end), and after what gap; as long as it never came back,
    how long it is. Recompute starts at the next shallower checkpoint; bytes are the state and the
    KV that only it needs. An end with others behind it is promised nothing of their uses: it goes
    early. But once the last end is evicted, its line will resume at the next shallower checkpoint,
    whatever its kind, which takes it as its `ward`: from then on it promises the ward's uses as
    well. So a path is trimmed from its end, and what is left is judged by who may come for it. What
    a waiting request will resume from (`expected`) is as good as used, an opportunistic one on
    probation comes next, before all that is learned; unproven ones make nothing behind them worth
    less, since most will be gone soon. Surplus ones go before all else, the oldest first: who
    leaves some pays with those of others. Of one prompt's every other one goes before the rest:
    gaps double, so that it stays covered, and edges merge in pairs, each token log n times instead
    of n.

    Facts are noted as they change, scores made when a victim is asked for (`Ranking`): a tick on
    which nothing is evicted costs nothing. What a checkpoint is worth by its neighbours is looked
    at again when the tree tells of a change, when it comes up as victim, and in turn, at least one
    each tick. Every 128 ticks the promises are learned anew.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = Costs() if costs is None else costs
        self._survival = Survival()
        self._ranking = Ranking(self._survival)
        self._stale: dict[Checkpoint, None] = {}  # to be judged before the next victim
        self._wards: dict[Checkpoint, Checkpoint] = {}  # the last lost end that falls back on it
        self._looked_at = -1
        self._relearn_at = 0
        self._lost_share = 0.0  # of ends that stand last, those gone when someone comes

    # -- what is told -----------------------------------------------------------------------

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        checkpoint.note = self._ranking.add(checkpoint, self._row(checkpoint), now)
        self._stale[checkpoint] = None
        above = nearest_above(checkpoint.node)
        ward = None if above is None else self._wards.get(above)
        if above is not None and ward is not None and is_above(checkpoint.node, ward.node):
            self._adopt(checkpoint, self._wards.pop(above))
            self._stale[above] = None

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        place = checkpoint.note
        if isinstance(place, int):
            self._ranking.classify(place, self._row(checkpoint), checkpoint.used, now)
            self._stale[checkpoint] = None

    def reconsider(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        del now
        if isinstance(checkpoint.note, int):
            self._stale[checkpoint] = None

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        place = checkpoint.note
        if isinstance(place, int):
            self._ranking.use(place, now)
            if checkpoint.kind in ENDS and checkpoint.standing == "last":
                self._lost_share += _LEARNING * (checkpoint.lost - self._lost_share)
        checkpoint.used = now
        checkpoint.hits += 1
        self.update(checkpoint, now)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """O(edges to its neighbour). It goes on being observed: its line may come back."""
        del now
        self._stale.pop(checkpoint, None)
        if isinstance(checkpoint.note, int):
            self._ranking.withdraw(checkpoint.note)
        ward = self._wards.pop(checkpoint, None)
        waits = ward is not None and ward.standing == "last"
        if checkpoint.kind in ENDS and checkpoint.standing == "last" and not waits:
            ward = checkpoint
        above = nearest_above(checkpoint.node)
        if above is not None and ward is not None:
            self._adopt(above, ward)

    def _adopt(self, checkpoint: Checkpoint, ward: Checkpoint) -> None:
        self._wards[checkpoint] = ward
        self._stale[checkpoint] = None

    def forget(self, checkpoint: Checkpoint) -> None:
        """O(n), vectorised."""
        if isinstance(checkpoint.note, int):
            self._ranking.remove(checkpoint.note)
        checkpoint.note = None
        self._stale.pop(checkpoint, None)
        self._wards.pop(checkpoint, None)

    def victim(self, now: int) -> Checkpoint | None:
        """O(n) once a tick, vectorised; then O(log n) amortised."""
        if now >= self._relearn_at:
            self._relearn_at = now + _RELEARN
            self._ranking.learn(now)
        if now != self._looked_at:
            self._looked_at = now
            looks = 1 + _LOOKS // (1 + len(self._ranking))
            self._stale.update(dict.fromkeys(self._ranking.some(looks)))
        while True:
            for checkpoint in self._stale:
                self._judge(checkpoint)
            self._stale.clear()
            first = self._ranking.first(now)
            if first is None or not self._judge(first):
                return first

    def numbers(self) -> dict[str, float]:
        """For dashboards. O(1).

        `lost_share`: of the ends that stood last on their path, the share that was already gone
        when a request came for it, recent requests weighing most. `observed`: checkpoints that are
        learned from, lost ones included.
        """
        return {
            "lost_share": self._lost_share,
            "classes": self._survival.classes,
            "uses_seen": self._survival.uses_seen,
            "observed": len(self._ranking),
        }

    # -- what is concluded ------------------------------------------------------------------

    def _row(self, checkpoint: Checkpoint) -> int:
        """The class: a group that sets the level, and a detail that refines it."""
        kind, standing = checkpoint.kind, checkpoint.standing
        detail = min(checkpoint.hits, _HITS)
        if kind not in ENDS:
            return self._survival.row(kind, detail, _PLACES.get(kind, 1.0))
        expected = None if checkpoint.line is None else checkpoint.line is kind
        if standing == "superseded":
            expected = None
        elif standing == "last":
            detail = self._pace(checkpoint)
            traits = self._traits(checkpoint)
            return self._survival.row((kind, standing, expected), detail, 1.0, traits)
        return self._survival.row((kind, standing, expected), detail, _STANDINGS[standing])

    @staticmethod
    def _traits(checkpoint: Checkpoint) -> tuple[int, int]:
        """Octave of the answer's length, and how many turns the line has had."""
        return 1 + min(checkpoint.answer_len.bit_length(), 12), 1 + min(checkpoint.turns, 6)

    @staticmethod
    def _pace(checkpoint: Checkpoint) -> int:
        """The gap of a line that came back, from 0 on; else the length of what may, below 0."""
        if checkpoint.gap:
            return min(int(math.log2(checkpoint.gap) / _OCTAVES), _CLASSES - 1)
        octaves = math.log2(max(checkpoint.depth / _SHORT_LEN, 1))
        return -1 - min(int(octaves / _OCTAVES), _CLASSES - 1)

    def _judge(self, checkpoint: Checkpoint) -> bool:
        """Look at what surrounds it; whether it is judged differently now."""
        place = checkpoint.note
        assert isinstance(place, int), checkpoint.depth
        if not checkpoint.evictable:
            return self._ranking.judge(place, 0.0, NOTHING, least=0.0, early=False)
        if checkpoint.surplus:
            last = _evenness(checkpoint.depth)
            return self._ranking.judge(place, last, NOTHING, least=0.0, early=True)
        node = checkpoint.node
        loss = self._costs.recompute(fallback_len(node), checkpoint.depth)
        freed = self._costs.state_bytes + only_len(node) * self._costs.token_bytes
        least = _SURE if checkpoint.expected else _MAYBE if checkpoint.on_probation else 0.0
        ward = self._ward(checkpoint)
        return self._ranking.judge(place, loss / freed, ward, least=least, early=False)

    def _ward(self, checkpoint: Checkpoint) -> int:
        """The place of the lost end whose line would resume here, unless that is its own line."""
        ward = self._wards.get(checkpoint)
        if ward is None:
            return NOTHING
        if not isinstance(ward.note, int):  # forgotten
            del self._wards[checkpoint]
            return NOTHING
        heir = checkpoint.kind in ENDS and checkpoint.standing == "last"
        own = heir and checkpoint.line in (None, checkpoint.kind)
        return NOTHING if own else ward.note


def _evenness(depth: int) -> float:
    """By how high a power of two a depth can be divided, in (0, 1]."""
    return (depth & -depth).bit_length() / 64
