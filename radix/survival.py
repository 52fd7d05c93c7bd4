"""When will a checkpoint be used? Rates by class and age, learned from what happened.

An actuary's estimate: per class and age bucket, uses divided by the ticks that checkpoints spent
there, so those that were evicted early or are still waiting bias nothing. Sparse data shrink
towards the same class at other ages, and that towards the pool of all classes. Traits multiply a
class's rates at every age (proportional hazards), by factors that all classes share.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt

    Table = npt.NDArray[np.float64]
    Numbers = npt.NDArray[np.int64]

Traits = tuple[int, int]

NO_TRAITS: Traits = (0, 0)
_PRIOR_USES = 2.0  # weight of the expected rate in one bucket, in uses
_CLASS_USES = 1.0  # weight of the wider group in a class's level, in uses
_TRAIT_USES = 8.0  # weight of "no difference" in a trait's factor, in uses
_FITS = 3  # rounds of fitting factors that several traits share
_FIRST_RATE = 0.5  # before anything is learned, the rate at age a is this / (a + 1)
_RARE = 1e-9  # where so few get to, differences of sums are noise: the plain rate is promised
_AT_ONCE = 32  # rows that are concluded together: what that takes stays in the L2 cache
_WAITS = 4096  # waits that are noted one by one before they are added up


def _bounds() -> list[int]:
    """Ages at which buckets begin: 0, 1, 2, 3, 4, 5, 6, 8, 11, 16, ... half octaves."""
    bounds = [0]
    while bounds[-1] < 1 << 22:
        bounds.append(max(bounds[-1] + 1, round(math.sqrt(2) ** (len(bounds) - 1))))
    return bounds


BOUNDS = _bounds()
BUCKETS = len(BOUNDS) - 1
_STARTS = np.array(BOUNDS[:-1])
_WIDTHS = np.diff(np.array(BOUNDS, dtype=np.float64))


def bucket_of(age: int) -> int:
    """The bucket an age falls into; the last has no end.

    >>> bucket_of(0), bucket_of(5), BOUNDS[bucket_of(5)]
    (0, 5, 5)
    """
    return min(BUCKETS, bisect_right(BOUNDS, age)) - 1


def buckets_of(ages: Numbers) -> Numbers:
    """The buckets that ages fall into."""
    buckets: Numbers = np.searchsorted(_STARTS, ages, "right") - 1
    return buckets


class Survival:
    """Uses and exposure per class and age bucket, and the best rate of use a wait can promise.

    A class is a pair (group, detail); details of one group share their level. A row is a class and
    traits: small numbers, 0 for a trait that does not apply. Rates are learned for all rows at
    once (`learn`), promises are concluded from them for those rows that are asked for.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, Traits], int] = {}
        self._classes: dict[tuple[Hashable, Hashable], int] = {}
        self._first: list[int] = []  # by class: its first row
        self._priors: dict[Hashable, float] = {}  # by group, in order of appearance
        # By row (and room for more of them) and bucket; rates are those of the last `learn`.
        self._uses, self._ticks, self._rate, self._promise = np.zeros((4, 64, BUCKETS))
        self.outdated = False  # a class has appeared since
        self._waits: list[tuple[int, int, int]] = []  # row, from age, to age: not yet in `_ticks`
        self.uses_seen = 0

    @property
    def classes(self) -> int:
        """How many classes have appeared."""
        return len(self._classes)

    def row(
        self, group: Hashable, detail: Hashable, prior: float, traits: Traits = NO_TRAITS
    ) -> int:
        """The number of a row; `prior` is a new group's level, 1 that of all classes pooled."""
        one = self._classes.setdefault((group, detail), len(self._classes))
        row = self._rows.get((one, traits))
        if row is None:
            row = self._rows[one, traits] = len(self._rows)
            self._priors.setdefault(group, prior)
            if row == len(self._uses):
                self._grow()
            if one == len(self._first):
                self._first.append(row)
                self.outdated = True
            # until the next look
            self._rate[row], self._promise[row] = self._rate[self._first[one]], np.nan
        return row

    def _grow(self) -> None:
        tables = self._uses, self._ticks, self._rate, self._promise
        self._uses, self._ticks, self._rate, self._promise = (
            np.concatenate((table, np.zeros_like(table))) for table in tables
        )

    def expose(self, row: int, bucket: int, ticks: int) -> None:
        """A checkpoint waited that long at that age."""
        self._ticks[row, bucket] += ticks

    def wait(self, row: int, start: int, end: int) -> None:
        """A checkpoint waited from one age to another. Amortised O(1)."""
        if start < end:
            self._waits.append((row, start, end))
            if len(self._waits) == _WAITS:
                self._settle()

    def wait_all(self, rows: Numbers, starts: Numbers, ends: Numbers) -> None:
        """Many did, pairwise. Vectorised."""
        self._add(rows, ends, 1)
        self._add(rows, starts, -1)

    def _settle(self) -> None:
        if self._waits:
            self.wait_all(*np.array(self._waits).T)
            self._waits.clear()

    def _add(self, rows: Numbers, ages: Numbers, sign: int) -> None:
        """Exposure from age 0 on: all of the buckets before that of the age, and part of it."""
        count = len(self._rows)
        buckets = buckets_of(ages)
        cells, shape = rows * BUCKETS + buckets, (count, BUCKETS)
        there = np.bincount(cells, minlength=count * BUCKETS).reshape(shape)
        part = np.bincount(cells, ages - _STARTS[buckets], count * BUCKETS).reshape(shape)
        beyond = there[:, ::-1].cumsum(axis=1)[:, ::-1] - there
        self._ticks[:count] += sign * (part + beyond * _WIDTHS)

    def use(self, row: int, bucket: int, share: float = 1.0) -> None:
        """A checkpoint of that age was used, or was with that probability."""
        self._uses[row, bucket] += share
        self.uses_seen += 1

    def promise(self, row: int, bucket: int) -> float:
        """Uses per tick that keeping one from this age on promises, as of the last `learn`."""
        return float(self.promises(np.array([row]), np.array([bucket]))[0])

    def promises(self, rows: Numbers, buckets: Numbers) -> Table:
        """The same for many, pairwise; learns first if a class has appeared since."""
        if self.outdated:
            self.learn()
        unknown = np.isnan(self._promise[rows, 0])
        if unknown.any():
            wanted = np.unique(rows[unknown])
            for start in range(0, len(wanted), _AT_ONCE):
                self._conclude(wanted[start : start + _AT_ONCE])
        found: Table = self._promise[rows, buckets]
        return found

    def learn(self) -> None:
        """Look at all that happened: O(rows x buckets), vectorised."""
        self._settle()
        count = len(self._rows)
        self.outdated = False
        self._promise[:count] = np.nan
        if count:
            self._rate[:count] = self._rates(_STARTS + _WIDTHS / 2)

    def _conclude(self, rows: Numbers) -> None:
        """The promises of some rows: O(rows x buckets^2), vectorised.

        The promise at age b is the best ratio, over all ages e to give up at, of the chance of a
        use in [b, e) to the expected wait (a Gittins index).
        """
        rate = self._rate[rows]
        used = -np.expm1(-rate * _WIDTHS)  # chance of a use within a bucket
        alive = np.ones_like(used)  # chance to reach it unused
        np.cumprod(1 - used[:, :-1], axis=1, out=alive[:, 1:])
        gain, wait = np.zeros((2, len(rows), BUCKETS + 1))
        np.cumsum(alive * used, axis=1, out=gain[:, 1:])
        np.cumsum(alive * used / rate, axis=1, out=wait[:, 1:])
        gained = gain[:, None, 1:] - gain[:, :-1, None]
        waited = wait[:, None, 1:] - wait[:, :-1, None]
        ratio = gained / np.where(waited > 0, waited, np.inf)
        best = np.maximum(ratio.max(axis=2), rate)
        self._promise[rows] = np.where(alive > _RARE, best, rate)

    def _rates(self, ages: Table) -> Table:
        """Uses per tick by row and bucket."""
        uses, ticks = self._uses[: len(self._rows)], self._ticks[: len(self._rows)]
        classes = np.array([one for one, _ in self._rows])
        by_class: Table = np.zeros((len(self._classes), len(self._rows)))
        by_class[classes, np.arange(len(classes))] = 1.0
        rates = self._class_rates(by_class @ uses, by_class @ ticks, ages)[classes]
        factors = self._factors(uses.sum(axis=1), (ticks * rates).sum(axis=1))
        product: Table = rates * factors[:, None]
        return product

    def _factors(self, seen: Table, expected: Table) -> Table:
        """By row: how much its traits multiply the rate, each fitted beside the others."""
        columns = np.array([traits for _, traits in self._rows]).T
        found: Table = np.ones(columns.shape)
        for _ in range(_FITS):
            for at, column in enumerate(columns):
                others = expected * np.delete(found, at, axis=0).prod(axis=0)
                uses = np.bincount(column, seen) + _TRAIT_USES
                factor = uses / (np.bincount(column, others) + _TRAIT_USES)
                factor[0] = 1.0  # the trait does not apply
                found[at] = factor[column]
        product: Table = found.prod(axis=0)
        return product

    def _class_rates(self, uses: Table, ticks: Table, ages: Table) -> Table:
        pooled_ticks = ticks.sum(axis=0) + _PRIOR_USES * (ages + 1) / _FIRST_RATE
        pooled = (uses.sum(axis=0) + _PRIOR_USES) / pooled_ticks
        expected, seen = ticks @ pooled, uses.sum(axis=1)
        numbers = {name: number for number, name in enumerate(self._priors)}
        group = np.array([numbers[key[0]] for key in self._classes])
        group_seen = np.bincount(group, seen) + _CLASS_USES * np.array([*self._priors.values()])
        group_level = (group_seen / (np.bincount(group, expected) + _CLASS_USES))[group]
        level = (seen + _CLASS_USES) / (expected + _CLASS_USES / group_level)
        rates: Table = (uses + _PRIOR_USES) / (ticks + _PRIOR_USES / np.outer(level, pooled))
        return rates
