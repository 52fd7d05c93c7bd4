"""Growth of counters between two moments: restarts, holes, series that come later; quantiles."""

import numpy as np
import pytest

from sgl_kimi_k3.dashboard.history import KEPT_S, History, quantile
from sgl_kimi_k3.dashboard.sample import Sample

HIT, ALL = "kimi_k3:resumed_tokens_total", "kimi_k3:input_tokens_total"


def history(*readings, interval_s=2.0):
    """Of (time, {name: value}) readings."""
    found = History(interval_s)
    for at, values in readings:
        found.add(Sample(at, {(name, ""): value for name, value in values.items()}, {}))
    return found


def grown(found, name, start, end):
    return sum(found.growth(name, start, end).values())


def test_growth_is_the_difference_between_the_moments():
    found = history((10, {ALL: 100}), (12, {ALL: 130}), (14, {ALL: 190}))
    assert grown(found, ALL, 10, 14) == 90
    assert grown(found, ALL, 12, 14) == 60
    assert grown(found, ALL, 0, 100) == 90  # as far as samples reach
    assert grown(found, ALL, 13, 14) == 30  # even in between
    assert found.covered(0, 100) == 4


def test_one_small_miss_cannot_pull_a_ratio_to_zero():
    """A prompt of 1000 tokens with 900 hit, then nine of ten tokens with none: 900 of 1090."""
    probes = [(2.0 + 2 * i, {ALL: 1000.0 + 10 * i, HIT: 900.0}) for i in range(1, 10)]
    found = history((0, {ALL: 0, HIT: 0}), (2, {ALL: 1000, HIT: 900}), *probes)
    assert (grown(found, HIT, 0, 20), grown(found, ALL, 0, 20)) == (900, 1090)


def test_a_restarted_server_counts_on():
    found = history((0, {ALL: 500}), (2, {ALL: 700}), (4, {ALL: 30}), (6, {ALL: 50}))
    assert found.restarts == 1
    assert grown(found, ALL, 0, 6) == 200 + 50
    assert grown(found, ALL, 2, 4) == 30
    assert found.last.total(ALL) == 50  # since the server's start


def test_one_fallen_counter_is_a_restart_for_all():
    """The other has already passed its old value, and would be taken to have grown by 5."""
    found = history((0, {ALL: 100, HIT: 10}), (2, {ALL: 40, HIT: 15}))
    assert (grown(found, ALL, 0, 2), grown(found, HIT, 0, 2)) == (40, 15)


def test_two_restarts_add_up():
    found = history((0, {ALL: 10}), (2, {ALL: 4}), (4, {ALL: 3}), (6, {ALL: 9}))
    assert found.restarts == 2
    assert grown(found, ALL, 0, 6) == 4 + 3 + 6


def test_a_series_that_appears_later_grew_from_nothing():
    found = history((0, {ALL: 10}), (2, {ALL: 20, HIT: 7}), (4, {ALL: 30, HIT: 9}))
    assert found.restarts == 0
    assert grown(found, HIT, 0, 4) == 9


def test_a_hole_is_not_guessed_over():
    found = history((0, {ALL: 0}), (2, {ALL: 2}), (4, {ALL: 4}), (60, {ALL: 9}), (62, {ALL: 9}))
    known = found.known(np.array([-1.0, 1, 3, 30, 61, 63]))
    assert known.tolist() == [False, True, True, False, True, False]


def test_gauges_are_of_the_moment_before():
    found = History(2.0)
    for at, running in ((0, 1.0), (2, 5.0)):
        found.add(Sample(at, {}, {("running", ""): running}))
    assert found.level("running", np.array([0.0, 1, 2, 9])).tolist() == [1, 1, 5, 5]
    assert np.isnan(found.level("other", np.array([1.0]))).all()
    assert np.isnan(found.level("running", np.array([-1.0]))).all()


def test_an_hour_is_kept_and_no_more():
    found = history(*((float(at), {ALL: at}) for at in range(0, 3 * int(KEPT_S), 100)))
    assert found.last.at - found.first_at <= KEPT_S
    assert grown(found, ALL, found.last.at - 3600, found.last.at) == 3600


def test_an_older_reading_is_ignored():
    found = history((4, {ALL: 10}), (2, {ALL: 3}))
    assert found.restarts == 0
    assert found.last.at == 4


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([10, 30, 30], 0.5, 0.125),  # rank 15: a quarter of the way from 0.1 to 0.2
        ([10, 30, 30], 0.25, 0.075),  # rank 7.5 of the first ten, from 0
        ([0, 0, 5], 0.5, 0.2),  # beyond the last bound: the last bound
        ([0, 0, 0], 0.5, None),
        ([4, 4, 4], 1.0, 0.1),
    ],
)
def test_quantiles_are_those_of_prometheus(counts, share, value):
    assert quantile(["0.1", "0.2", "+Inf"], counts, share) == pytest.approx(value)
    assert quantile(["+Inf", "0.1", "0.2"], [counts[2], *counts[:2]], share) == pytest.approx(value)
