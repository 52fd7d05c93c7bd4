"""Samples of one server over time, as growth of counters between any two moments.

A counter that fell means that the server was started again: from then on everything it counts is
growth, as Prometheus has it. One fallen counter settles it for all, since another may already have
passed its old value. Between two samples a counter is taken to grow evenly; a hole in the samples,
three intervals long or more, is not guessed over.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sgl_kimi_k3.dashboard.sample import Key, Sample

Floats = npt.NDArray[np.float64]

KEPT_S = 3700.0  # an hour, and what a line at its start looks back on


class History:
    """The last hour of samples. `interval_s` is how often one is expected.

    >>> from sgl_kimi_k3.dashboard.sample import Sample
    >>> history = History(interval_s=2.0)
    >>> for at, count in ((0, 5), (2, 9), (4, 3)):  # started again before the last
    ...     history.add(Sample(at, {("n", ""): count}, {}))
    >>> history.growth("n", 0, 4)
    {'': 7.0}
    """

    def __init__(self, interval_s: float) -> None:
        self.hole_s = 3 * interval_s
        self.restarts = 0
        self.last: Sample | None = None
        self._columns: dict[Key, int] = {}
        self._base = np.zeros(0)  # what earlier lives of the server counted
        self._times: deque[float] = deque()
        self._rows: deque[Floats] = deque()
        self._levels: deque[dict[Key, float]] = deque()

    @property
    def first_at(self) -> float | None:
        """Time of the oldest sample."""
        return self._times[0] if self._times else None

    def add(self, sample: Sample) -> None:
        """Append a sample; one that is not newer than the last is ignored."""
        if self._times and sample.at <= self._times[-1]:
            return
        for key in sample.counters:
            self._columns.setdefault(key, len(self._columns))
        raw = np.zeros(len(self._columns))
        for key, value in sample.counters.items():
            raw[self._columns[key]] = value
        self._base = _padded(self._base, len(raw))
        if self.last is not None and _fell(self.last, sample):
            self.restarts += 1
            self._base = _padded(self._rows[-1], len(raw))
        self.last = sample
        self._times.append(sample.at)
        self._rows.append(self._base + raw)
        self._levels.append(dict(sample.gauges))
        while self._times[-1] - self._times[0] > KEPT_S:
            for kept in (self._times, self._rows, self._levels):
                kept.popleft()

    def growth(self, name: str, start: float, end: float) -> dict[str, float]:
        """Growth of a counter in [start, end], as far as samples reach, by its label."""
        edges = np.array([start, end])
        return {
            label: float(values[1] - values[0]) for label, values in self.at(name, edges).items()
        }

    def covered(self, start: float, end: float) -> float:
        """How many seconds of [start, end] lie between the first and the last sample."""
        if not self._times:
            return 0.0
        return max(0.0, min(end, self._times[-1]) - max(start, self._times[0]))

    def at(self, name: str, edges: Floats) -> dict[str, Floats]:
        """A counter's value at each of `edges` [n], seconds ascending, by its label."""
        found = {label: i for (key, label), i in self._columns.items() if key == name}
        if not self._times or not found:
            return {}
        times = np.array(self._times)
        return {
            label: np.interp(
                edges, times, [row[column] if column < len(row) else 0.0 for row in self._rows]
            )
            for label, column in found.items()
        }

    def level(self, name: str, edges: Floats) -> Floats:
        """A gauge, added up over its label: the last value before each of `edges`; NaN: none."""
        times = np.array(self._times)
        before = np.searchsorted(times, edges, side="right") - 1
        values = [
            sum((v for key, v in levels.items() if key[0] == name), start=0.0)
            if any(key[0] == name for key in levels)
            else np.nan
            for levels in self._levels
        ]
        return np.array(
            [values[i] if i >= 0 else np.nan for i in before] if values else [np.nan] * len(edges)
        )

    def known(self, edges: Floats) -> npt.NDArray[np.bool_]:
        """For each of `edges`, whether it lies between samples that are no hole apart."""
        times = np.array(self._times)
        if len(times) < 2:
            return np.zeros(len(edges), dtype=np.bool_)
        after = np.searchsorted(times, edges, side="left")
        inside = (edges >= times[0]) & (edges <= times[-1])
        after = after.clip(1, len(times) - 1)
        answer: npt.NDArray[np.bool_] = inside & (times[after] - times[after - 1] < self.hole_s)
        return answer


def quantile(bounds: Sequence[str], counts: Sequence[float], share: float) -> float | None:
    """A quantile of a histogram, evenly spread within its bucket, as `histogram_quantile` has it.

    Args:
        bounds: upper bounds (`le`) as written, `+Inf` among them; in any order.
        counts: observations up to each bound.
        share: 0 to 1.

    Returns:
        None without observations; the last finite bound if it lies beyond.

    >>> quantile(["0.1", "0.2", "+Inf"], [10, 30, 30], 0.5)
    0.125
    """
    buckets = sorted(zip(map(float, bounds), counts, strict=True))
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def _fell(before: Sample, after: Sample) -> bool:
    """Whether a counter lost value or is gone."""
    counters = after.counters
    return any(counters.get(key, 0.0) < value for key, value in before.counters.items())


def _padded(row: Floats, width: int) -> Floats:
    return np.pad(row, (0, width - len(row)))
