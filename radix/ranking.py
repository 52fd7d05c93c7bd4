"""All checkpoints scored at once, and the next victims among them, in order.

Each observed checkpoint has a place in parallel columns, so that a look at thousands of them is a
few vector operations. Facts go in as they change; nothing is scored before a victim is asked for.
Then all are scored for that tick and the least few stand in front; more, when those are used up.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from radix.survival import BOUNDS, bucket_of, buckets_of

if TYPE_CHECKING:
    from radix.checkpoint import Checkpoint
    from radix.survival import Numbers, Survival, Table

NOTHING = 0  # the place of no checkpoint: promises nothing, is never a victim
_NOBODY = -1  # the row there, and at unused places
_NEVER = np.iinfo(np.int64).max
_EARLY = -(2.0**40)  # below every score, also with ticks added; leaves 12 bits of fraction
_FEW = 64  # places up to which they are scored one by one
_MORE = 8  # times as many victims as before are selected when those in front are used up
_ENDS = np.array(BOUNDS[1:])

_Judgement = tuple[float, int, float, bool]  # worth, ward, least, early
_UNJUDGED: _Judgement = (0.0, NOTHING, 0.0, False)


class Ranking:
    """What checkpoints are of, at which age, and worth; and the order that follows.

    score = worth x max(promise + promise of its ward, least)

    where a promise is that of a row at an age. A ward is another place, mostly one that was
    withdrawn. Worth 0 means: no victim. Those who are `early` come before all others, the
    least recently used or made first; of one tick, by worth (at most 1). Of equals the one that was
    classified first goes.
    """

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._checkpoints: list[Checkpoint | None] = []  # by place
        self._entries: list[int] = []  # by place: the serial of its valid entry in front, 0: none
        self._adopted: list[int] = []  # by place: whose ward it is, how many
        self._judged: list[_Judgement] = []  # by place
        self._unused: list[int] = []  # places
        self._numbers: Numbers
        self._values: Table
        self._news: dict[int, None] = {}  # places whose score is older than what it is made of
        self._serial = 0
        self._resize(64)
        self._open()  # NOTHING
        self._cursor = 0  # of `some`
        self._scored_at = -1  # the tick that scores are for
        self._front: list[tuple[float, int, int, int]] = []  # score, order, serial, place
        self._bound = (-np.inf, 0)  # score and order of the last that was selected
        self._selected = 0  # how many were

    def __len__(self) -> int:
        return len(self._checkpoints) - len(self._unused) - 1

    def _resize(self, places: int) -> None:
        numbers: Numbers = np.zeros((7, places), dtype=np.int64)
        values: Table = np.zeros((4, places))
        used = len(self._checkpoints)
        if used:
            numbers[:, :used], values[:, :used] = self._numbers, self._values
        self._numbers, self._values = numbers, values
        self._row, self._used, self._since, self._due = numbers[:4]
        self._ward, self._order, self._early = numbers[4:]
        self._promise, self._least, self._worth, self._score = values

    def _open(self) -> int:
        if self._unused:
            return self._unused.pop()
        place = len(self._checkpoints)
        if place == len(self._row):
            self._resize(2 * place)
        self._checkpoints.append(None)
        self._entries.append(0)
        self._adopted.append(0)
        self._judged.append(_UNJUDGED)
        self._row[place], self._due[place], self._score[place] = _NOBODY, _NEVER, np.inf
        return place

    # -- who is there -----------------------------------------------------------------------

    def add(self, checkpoint: Checkpoint, row: int, now: int) -> int:
        """Observe it from now on; its place. No victim before it is judged."""
        place = self._open()
        self._checkpoints[place] = checkpoint
        self._due[place] = 0
        self.classify(place, row, checkpoint.used, now)
        return place

    def withdraw(self, place: int) -> None:
        """It was evicted: no victim any more, but it goes on being observed and promising."""
        self._judged[place] = _UNJUDGED
        self._least[place] = self._worth[place] = 0.0
        self._score[place] = np.inf
        self._early[place] = self._entries[place] = 0
        self._adopt(place, NOTHING)

    def _adopt(self, place: int, ward: int) -> None:
        self._adopted[self._ward[place]] -= 1
        self._ward[place] = ward
        self._adopted[ward] += 1

    def remove(self, place: int) -> None:
        """Observe it no longer; what it waited since the last look is not counted."""
        self.withdraw(place)
        if self._adopted[place]:
            for other in np.flatnonzero(self._ward[: len(self._checkpoints)] == place).tolist():
                self._adopt(other, NOTHING)
        self._due[place], self._promise[place] = _NEVER, 0.0
        self._row[place], self._checkpoints[place] = _NOBODY, None
        self._unused.append(place)

    def some(self, count: int) -> list[Checkpoint]:
        """The next few places' checkpoints that are not lost, in turn."""
        total = len(self._checkpoints)
        places = [place % total for place in range(self._cursor, self._cursor + min(count, total))]
        self._cursor = (self._cursor + count) % total
        found = map(self._checkpoints.__getitem__, places)
        return [one for one in found if one is not None and not one.lost]

    # -- what is known of them --------------------------------------------------------------

    def classify(self, place: int, row: int, used: int, now: int) -> None:
        """From now on it is of that row, and its age counts from `used`. No change is no news."""
        if self._row[place] == row and self._used[place] == used:
            return
        self._wait(place, now)
        self._row[place], self._used[place], self._since[place] = row, used, now
        self._serial += 1
        self._order[place] = self._serial
        self._due[place] = 0
        self._tell(place)

    def use(self, place: int, now: int) -> None:
        """It was used, being of that row and age; by its ward's users, as far as those promised."""
        own, theirs = self._promise[place], self._promise[self._ward[place]]
        share = float(own / (own + theirs)) if theirs else 1.0
        self._survival.use(int(self._row[place]), bucket_of(now - int(self._used[place])), share)

    def judge(self, place: int, worth: float, ward: int, *, least: float, early: bool) -> bool:
        """What it is worth, its ward, the least it promises; whether that is news."""
        judgement = worth, ward, least, early
        if self._judged[place] == judgement:
            return False
        self._judged[place] = judgement
        self._worth[place], self._least[place], self._early[place] = worth, least, early
        self._adopt(place, ward)
        self._tell(place)
        return True

    def _tell(self, place: int) -> None:
        self._entries[place] = 0
        self._news[place] = None

    def _wait(self, place: int, now: int) -> None:
        if self._row[place] != _NOBODY:
            row, used, since = self._row[place], self._used[place], self._since[place]
            self._survival.wait(int(row), int(since - used), int(now - used))

    def learn(self, now: int) -> None:
        """Count how long all of them have waited, and look at all that happened."""
        places = np.flatnonzero(self._row[: len(self._checkpoints)] != _NOBODY)
        used, since = self._used[places], self._since[places]
        self._survival.wait_all(self._row[places], since - used, now - used)
        self._survival.learn()
        self._since[places] = now
        self._due[self._due < _NEVER] = 0
        self._scored_at = -1

    # -- who goes first ---------------------------------------------------------------------

    def first(self, now: int) -> Checkpoint | None:
        """The least score at that tick. O(places) once a tick, vectorised, then O(log n)."""
        if self._survival.outdated:
            self.learn(now)
        if now != self._scored_at or len(self._news) > _FEW:
            self._scored_at = now
            self._rescore_all(now)
            self._front, self._selected, self._bound = [], 0, (-np.inf, 0)
        else:
            for place in self._news:
                if self._rescore(place, now) <= self._bound:
                    self._push(place)
        self._news.clear()
        while True:
            while self._front:
                _, _, serial, place = self._front[0]
                if self._entries[place] == serial:
                    return self._checkpoints[place]
                heapq.heappop(self._front)
            if not self._select():
                return None

    def _age(self, places: Numbers, now: int) -> None:
        """Look up what these promise at their age."""
        if len(places):
            buckets = buckets_of(now - self._used[places])
            self._promise[places] = self._survival.promises(self._row[places], buckets)
            self._due[places] = self._used[places] + _ENDS[buckets]

    def _rescore_all(self, now: int) -> None:
        count = len(self._checkpoints)
        self._age(np.flatnonzero(self._due[:count] <= now), now)
        worth, early = self._worth[:count], self._early[:count]
        scores = self._promise[:count] + self._promise[self._ward[:count]]
        np.maximum(scores, self._least[:count], out=scores)
        scores *= worth
        if early.any():
            np.add(self._used[:count] + _EARLY, worth, out=scores, where=early > 0)
        scores[worth == 0] = np.inf
        self._score[:count] = scores

    def _rescore(self, place: int, now: int) -> tuple[float, int]:
        """The same for one; its score and order."""
        if self._due[place] <= now:
            self._age(np.array([place]), now)
        worth, ward, least, early = self._judged[place]
        score = worth * max(self._promise.item(place) + self._promise.item(ward), least)
        if early:
            score = self._used.item(place) + _EARLY + worth
        score = score if worth else np.inf
        self._score[place] = score
        return score, self._order.item(place)

    def _push(self, place: int) -> None:
        self._serial += 1
        self._entries[place] = self._serial
        score, order = self._score.item(place), self._order.item(place)
        heapq.heappush(self._front, (score, order, self._serial, place))

    def _select(self) -> bool:
        """Put the least few in front, which is empty; False: there are none."""
        scores = self._score[: len(self._checkpoints)]
        self._selected = min(_MORE * self._selected or 1, len(scores))
        limit = scores.min()
        if self._selected > 1:
            limit = np.partition(scores, self._selected - 1)[self._selected - 1]
        chosen = np.flatnonzero(scores < limit)
        if limit < np.inf:
            ties = np.flatnonzero(scores == limit)
            need = self._selected - len(chosen)
            if need < len(ties):
                ties = ties[np.argpartition(self._order[ties], need - 1)[:need]]
            chosen = np.concatenate((chosen, ties))
        places = chosen.tolist()
        serials = range(self._serial + 1, self._serial + 1 + len(places))
        self._serial += len(places)
        for place, serial in zip(places, serials, strict=True):
            self._entries[place] = serial
        scores, order = self._score[chosen].tolist(), self._order[chosen].tolist()
        self._front = sorted(zip(scores, order, serials, places, strict=True))  # a heap as well
        if places:
            self._bound = self._front[-1][:2]
        return bool(self._front)
