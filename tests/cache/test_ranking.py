"""The ranking against a plain search; waits added up in bulk against buckets counted by hand."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radix.ranking import NOTHING, Ranking
from radix.survival import Survival, bucket_of

WORTHS = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0])  # ties are frequent, 0 is no victim
JUDGED = st.tuples(WORTHS, st.sampled_from([0.0, 0.0, 2.0]), st.booleans())


class Plain:
    """What is known of each place, in order of classification."""

    def __init__(self, rows: int) -> None:
        self.survival = Survival()
        self.rows = [self.survival.row("group", number, 1.0) for number in range(rows)]
        self.ranking = Ranking(self.survival)
        self.known: dict[int, list] = {}  # place: row, used, worth, ward, least, early

    def add(self, number: int, now: int) -> int:
        row = self.rows[number % len(self.rows)]
        place = self.ranking.add(SimpleNamespace(used=now, number=number), row, now)
        self.known[place] = [row, now, 0.0, NOTHING, 0.0, False]
        return place

    def judge(self, place: int, worth: float, ward: int, least: float, early: bool) -> None:
        early = early and worth > 0
        self.known[place][2:] = worth, ward, least, early
        self.ranking.judge(place, worth, ward, least=least, early=early)

    def score(self, place: int, now: int) -> float:
        _, used, worth, ward, least, early = self.known[place]
        if early:
            return used - 2**40 + worth
        promise = sum(
            self.survival.promise(self.known[one][0], bucket_of(now - self.known[one][1]))
            for one in (place, ward)
            if one != NOTHING
        )
        return worth * max(promise, least)

    def least(self, now: int) -> int | None:
        able = [place for place, known in self.known.items() if known[2] > 0]
        return min(able, key=lambda place: self.score(place, now), default=None)


@given(
    judged=st.lists(JUDGED, min_size=1, max_size=150),
    again=st.lists(st.tuples(st.integers(0, 149), JUDGED), max_size=100),
    ages=st.lists(st.integers(0, 40), max_size=5),
)
def test_victims_come_in_the_order_of_a_plain_search(judged, again, ages):
    plain = Plain(rows=3)
    now = 0
    places = [plain.add(number, now + number // 8) for number in range(len(judged))]
    now = len(judged)
    for number, (worth, least, early) in enumerate(judged):
        ward = places[number // 2] if number % 3 == 0 else NOTHING
        plain.judge(places[number], worth, ward, least, early)
    for step, (number, (worth, least, early)) in enumerate(again):
        place = places[number % len(places)]
        if plain.known[place][2] > 0:
            plain.judge(place, worth, NOTHING, least, early)
        now += ages[step] if step < len(ages) else 0  # then all on one tick
        first, expected = plain.ranking.first(now), plain.least(now)
        assert (first is None) == (expected is None)
        if first is not None:
            assert first.number == places.index(expected)
            plain.ranking.withdraw(expected)
            plain.known[expected][2:] = 0.0, NOTHING, 0.0, False


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=20))
def test_waits_are_spread_over_the_ages_they_cover(waits):
    one, many, hand = Survival(), Survival(), Survival()
    rows = [survival.row("group", 0, 1.0) for survival in (one, many, hand)]
    spans = [(min(pair), max(pair)) for pair in waits]
    for start, end in spans:
        one.wait(rows[0], start, end)
        for age in range(start, end):
            hand.expose(rows[2], bucket_of(age), 1)
    one.learn()
    starts, ends = np.array([*spans, (0, 0)]).T
    many.wait_all(np.zeros(len(starts), dtype=np.int64), starts, ends)
    for survival in (one, many):
        assert survival._ticks[0].tolist() == hand._ticks[0].tolist()
    assert hand._ticks.sum() == sum(end - start for start, end in spans)
