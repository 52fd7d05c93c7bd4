"""The shipped policy: the least expected recompute per byte and tick goes first."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from radix.eviction import VOID_ENTRIES_MIN
from radix.node import fallback_len, newest_below, only_len
from radix.survival import BOUNDS, BUCKETS, Survival, bucket_of
from radix.values import ENDS, Costs, Kind

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint

_RELEARN = 128  # ticks between two looks at what was learned
_OCTAVES = 1.5  # width of a class of gaps, and of lengths
_CLASSES = 7  # of either
_SHORT_LEN = 512  # tokens; shorter paths are of one class
_LEARNING = 0.01  # weight of one request in the share of lost ends
_HITS = 3  # more are told apart no further
_SURE = 1.0  # uses per tick of what a waiting request will resume from

# How often a class is used before anything is learned, beside ends that stand last on their path.
_STANDINGS = {"last": 1.0, "twin": 0.2, "superseded": 0.02}
_PLACES = {Kind.INTERVAL: 0.1, Kind.BOUNDARY: 0.5, Kind.OPPORTUNISTIC: 0.1}


class _Note:
    """What the policy remembers of one checkpoint."""

    __slots__ = ("bucket", "due", "entry", "row", "since", "timer")

    def __init__(self, row: int, now: int) -> None:
        self.row = row
        self.bucket = 0
        self.since = now  # exposure is counted up to here
        self.due = -1  # when it enters the next bucket
        self.entry = 0  # serial of its valid place in the order, 0: none
        self.timer = 0  # serial of its valid timer


class ExpectedLoss:
    """Score = promised uses per tick x recompute that each would cost / bytes freed.

    The promise is learned (`Survival`) by class: what kind of checkpoint, whether later ends stand
    behind it, whether its line of turns came back through its kind of end (clients that drop the
    model's thinking never resume a turn's end), and after what gap; as long as it never came back,
    how long it is. Recompute starts at the next shallower checkpoint; bytes are the state and the
    KV that only it needs. An end with others behind it is also what remains of the path once those
    are evicted, so it is promised the part of their uses that comes too late: earlier ends go
    early, but some stay to trim a path by. What a waiting request will resume from (`expected`) is
    as good as used. Unproven opportunistic checkpoints go before all else.

    The order is a heap of scores. Ages move scores down: a timer re-scores a checkpoint whenever
    it enters the next age bucket, O(log age) times. Scores that only rise are corrected when they
    come up. Every 128 ticks all are re-scored.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = Costs() if costs is None else costs
        self._survival = Survival()
        self._order: list[tuple[bool, float, int, Checkpoint]] = []
        self._timers: list[tuple[int, int, Checkpoint]] = []
        self._timers_limit = VOID_ENTRIES_MIN
        self._evictable: dict[Checkpoint, None] = {}
        self._serial = 0
        self._relearn_at = 0
        self._lost_share = 0.0  # of ends that stand last, those gone when someone comes

    # -- what is told -----------------------------------------------------------------------

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n)."""
        checkpoint.note = _Note(self._row(checkpoint), now)
        self._set_timer(checkpoint)
        self._place(checkpoint)

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n)."""
        note = checkpoint.note
        if not isinstance(note, _Note):
            return
        self._advance(now)
        self._expose(note, now)
        note.row = self._row(checkpoint)
        note.bucket = bucket_of(now - checkpoint.used)
        self._set_timer(checkpoint)
        self._place(checkpoint)

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """O(log n)."""
        note = checkpoint.note
        if isinstance(note, _Note):
            self._advance(now)
            self._expose(note, now)
            self._survival.use(note.row, note.bucket)
            if checkpoint.kind in ENDS and checkpoint.standing == "last":
                self._lost_share += _LEARNING * (checkpoint.lost - self._lost_share)
            note.bucket = 0
        checkpoint.used = now
        checkpoint.hits += 1
        if isinstance(note, _Note):
            note.row = self._row(checkpoint)
            self._set_timer(checkpoint)
            self._place(checkpoint)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1). It goes on being observed: what it would have been worth is worth knowing."""
        del now
        self._evictable.pop(checkpoint, None)
        if isinstance(checkpoint.note, _Note):
            checkpoint.note.entry = 0

    def forget(self, checkpoint: Checkpoint) -> None:
        """O(1)."""
        checkpoint.note = None
        self._evictable.pop(checkpoint, None)

    def victim(self, now: int) -> Checkpoint | None:
        """Amortised O(log n)."""
        self._advance(now)
        if now >= self._relearn_at:
            self._relearn_at = now + _RELEARN
            self._survival.learn()
            self._reorder()
        while self._order:
            _, score, serial, checkpoint = self._order[0]
            note = checkpoint.note
            if not isinstance(note, _Note) or note.entry != serial:
                heapq.heappop(self._order)
            elif self._score(checkpoint, note) > score:
                heapq.heappop(self._order)
                self._place(checkpoint)
            else:
                return checkpoint
        return None

    def numbers(self) -> dict[str, float]:
        """For dashboards. O(1).

        `lost_share`: of the ends that stood last on their path, the share that was already gone
        when a request came for it, recent requests weighing most.
        """
        return {
            "lost_share": self._lost_share,
            "classes": self._survival.classes,
            "uses_seen": self._survival.uses_seen,
            "evictable": len(self._evictable),
            "order_entries": len(self._order),
            "timer_entries": len(self._timers),
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

    def _score(self, checkpoint: Checkpoint, note: _Note) -> float:
        node = checkpoint.node
        loss = self._costs.recompute(fallback_len(node), checkpoint.depth)
        freed = self._costs.state_bytes + only_len(node) * self._costs.token_bytes
        promise = self._survival.promise(note.row, note.bucket)
        if checkpoint.later or checkpoint.twins:
            behind = newest_below(node, ENDS)
            if behind is not None and isinstance(behind.note, _Note):
                fallback = self._survival.promise(behind.note.row, behind.note.bucket)
                promise += self._lost_share * fallback
        if checkpoint.expected:
            promise = max(promise, _SURE)
        return promise * loss / freed

    def _place(self, checkpoint: Checkpoint) -> None:
        note = checkpoint.note
        assert isinstance(note, _Note)
        if not checkpoint.evictable:
            note.entry = 0
            self._evictable.pop(checkpoint, None)
            return
        self._evictable[checkpoint] = None
        heapq.heappush(self._order, self._entry(checkpoint, note))
        if len(self._order) > 2 * len(self._evictable) + VOID_ENTRIES_MIN:
            self._reorder()

    def _entry(self, checkpoint: Checkpoint, note: _Note) -> tuple[bool, float, int, Checkpoint]:
        self._serial += 1
        note.entry = self._serial
        proven = (
            checkpoint.kind is not Kind.OPPORTUNISTIC or checkpoint.hits > 0 or checkpoint.expected
        )
        return proven, self._score(checkpoint, note), self._serial, checkpoint

    def _reorder(self) -> None:
        self._order = []
        for checkpoint in self._evictable:
            note = checkpoint.note
            assert isinstance(note, _Note)
            self._order.append(self._entry(checkpoint, note))
        heapq.heapify(self._order)

    # -- the passing of time ----------------------------------------------------------------

    def _expose(self, note: _Note, now: int) -> None:
        self._survival.expose(note.row, note.bucket, now - note.since)
        note.since = now

    def _set_timer(self, checkpoint: Checkpoint) -> None:
        note = checkpoint.note
        assert isinstance(note, _Note)
        due = checkpoint.used + BOUNDS[note.bucket + 1]
        if due != note.due:
            self._serial += 1
            note.due, note.timer = due, self._serial
            heapq.heappush(self._timers, (due, self._serial, checkpoint))
            if len(self._timers) > self._timers_limit:
                self._timers = [entry for entry in self._timers if _is_set(*entry)]
                heapq.heapify(self._timers)
                self._timers_limit = 2 * len(self._timers) + VOID_ENTRIES_MIN

    def _advance(self, now: int) -> None:
        """Move everything that came of age into its next bucket."""
        timers = self._timers
        while timers and timers[0][0] <= now:
            due, serial, checkpoint = heapq.heappop(timers)
            note = checkpoint.note
            if isinstance(note, _Note) and note.timer == serial:
                self._expose(note, max(due, note.since))
                note.bucket = min(note.bucket + 1, BUCKETS - 1)
                self._set_timer(checkpoint)
                timers = self._timers  # a sweep replaces them
                if note.entry:
                    heapq.heappush(self._order, self._entry(checkpoint, note))
        if len(self._order) > 2 * len(self._evictable) + VOID_ENTRIES_MIN:
            self._reorder()


def _is_set(_due: int, serial: int, checkpoint: Checkpoint) -> bool:
    """Whether a timer is the valid one of its checkpoint."""
    note = checkpoint.note
    return isinstance(note, _Note) and note.timer == serial
