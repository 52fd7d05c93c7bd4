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

Traits = tuple[int, int]

NO_TRAITS: Traits = (0, 0)
_PRIOR_USES = 2.0  # weight of the expected rate in one bucket, in uses
_CLASS_USES = 1.0  # weight of the wider group in a class's level, in uses
_TRAIT_USES = 8.0  # weight of "no difference" in a trait's factor, in uses
_FITS = 3  # rounds of fitting factors that several traits share
_FIRST_RATE = 0.5  # before anything is learned, the rate at age a is this / (a + 1)
_RARE = 1e-9  # where so few get to, differences of sums are noise: the plain rate is promised


def _bounds() -> list[int]:
    """Ages at which buckets begin: 0, 1, 2, 3, 4, 5, 6, 8, 11, 16, ... half octaves."""
    bounds = [0]
    while bounds[-1] < 1 << 22:
        bounds.append(max(bounds[-1] + 1, round(math.sqrt(2) ** (len(bounds) - 1))))
    return bounds


BOUNDS = _bounds()
BUCKETS = len(BOUNDS) - 1


def bucket_of(age: int) -> int:
    """The bucket an age falls into; the last has no end.

    >>> bucket_of(0), bucket_of(5), BOUNDS[bucket_of(5)]
    (0, 5, 5)
    """
    return min(BUCKETS, bisect_right(BOUNDS, age)) - 1


class Survival:
    """Uses and exposure per class and age bucket, and the best rate of use a wait can promise.

    A class is a pair (group, detail); details of one group share their level. A row is a class and
    traits: small numbers, 0 for a trait that does not apply.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, Traits], int] = {}
        self._classes: dict[tuple[Hashable, Hashable], int] = {}
        self._priors: dict[Hashable, float] = {}  # by group, in order of appearance
        self._uses: list[list[float]] = []
        self._ticks: list[list[float]] = []
        self._promise: list[list[float]] = []
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
            self._uses.append([0.0] * BUCKETS)
            self._ticks.append([0.0] * BUCKETS)
            sibling = next((at for (other, _), at in self._rows.items() if other == one), row)
            if sibling == row:
                self.learn()
            else:  # until the next look
                self._promise.append(self._promise[sibling])
        return row

    def expose(self, row: int, bucket: int, ticks: int) -> None:
        """A checkpoint waited that long at that age."""
        self._ticks[row][bucket] += ticks

    def use(self, row: int, bucket: int) -> None:
        """A checkpoint of that age was used."""
        self._uses[row][bucket] += 1
        self.uses_seen += 1

    def promise(self, row: int, bucket: int) -> float:
        """Uses per tick that keeping one from this age on promises, as of the last `learn`."""
        return self._promise[row][bucket]

    def learn(self) -> None:
        """Recompute the promises: O(classes x buckets^2), vectorised.

        The promise at age b is the best ratio, over all ages e to give up at, of the chance of a
        use in [b, e) to the expected wait (a Gittins index).
        """
        bounds = np.array(BOUNDS, dtype=np.float64)
        width = np.diff(bounds)
        rate = self._rates((bounds[:-1] + bounds[1:]) / 2)
        used = -np.expm1(-rate * width)  # chance of a use within a bucket
        alive = np.ones_like(used)  # chance to reach it unused
        np.cumprod(1 - used[:, :-1], axis=1, out=alive[:, 1:])
        gain = np.pad(np.cumsum(alive * used, axis=1), ((0, 0), (1, 0)))
        wait = np.pad(np.cumsum(alive * used / rate, axis=1), ((0, 0), (1, 0)))
        gained = gain[:, None, 1:] - gain[:, :-1, None]
        waited = wait[:, None, 1:] - wait[:, :-1, None]
        sure = (alive[:, :, None] > _RARE) & (waited > 0)
        ratio = np.divide(gained, waited, out=np.zeros_like(gained), where=sure)
        self._promise = np.maximum(np.triu(ratio).max(axis=2), rate).tolist()

    def _rates(self, ages: Table) -> Table:
        """Uses per tick by row and bucket."""
        uses, ticks = np.array(self._uses), np.array(self._ticks)
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
