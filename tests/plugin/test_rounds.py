"""What repeated rounds of a benchmark say."""

import random
from statistics import median

import pytest

from tests.bench import rounds


def cell(server: str, ttft: float, tpot: float, **more: object) -> dict:
    figures = {"ttft_ms": ttft, "itl_ms": tpot, "tpot_ms": tpot}
    nested = {name: {"p50": value, "p95": value} for name, value in figures.items()}
    named = {"server": server, "load": "decode", "clients": 8, "round": 0}
    return named | {"requests": 8, "failures": [], "dead": False, **nested, **more}


@pytest.mark.parametrize(
    ("count", "at"), [(5, None), (6, 0), (8, 0), (9, 1), (12, 2), (15, 3), (20, 5)]
)
def test_the_interval_is_that_of_the_sign_test(count: int, at: int | None) -> None:
    """Conover, Practical Nonparametric Statistics, table of the binomial at p = 1/2."""
    found = rounds.interval([float(n) for n in range(count)])
    assert found == (None if at is None else (at, count - 1 - at))


def test_the_interval_holds_the_median_at_least_as_often_as_it_says() -> None:
    source, held = random.Random(1), 0
    for _ in range(2_000):
        low, high = rounds.interval([source.expovariate(1.0) for _ in range(11)])
        held += low <= 0.6931 <= high
    assert held / 2_000 > 0.94


def test_ratios_are_taken_in_each_round() -> None:
    """A machine that slows down twofold for a round changes no ratio."""
    slow = [1, 2, 1, 1, 2, 1, 3]
    cells = [
        cell(name, 10.0 * pace, factor * pace, round=turn)
        for turn, pace in enumerate(slow)
        for name, factor in (("stock", 2.0), ("ours", 1.9))
    ]
    [row] = rounds.ratios(cells, [("ours", "stock")])
    assert row["rounds"] == 7
    assert row["tpot_ms"]["median"] == pytest.approx(0.95)
    assert row["tpot_ms"]["interval"] == pytest.approx((0.95, 0.95))
    assert row["ttft_ms"]["median"] == 1
    assert "ours / stock: decode 8 clients, 7 rounds" in rounds.ratio_line(row)
    assert "TPOT 0.950 (0.950 to 0.950)" in rounds.ratio_line(row)


def test_a_round_that_one_of_them_did_not_play_whole_is_left_out() -> None:
    """Who failed everything took no time for it."""
    gone = {"server": "stock", "load": "decode", "clients": 8, "dead": True, "round": 0}
    broken = [
        {"requests": 0, "failures": ["refused"] * 8},
        {"requests": 7, "failures": ["lost"]},
        {"requests": 8, "dead": True},
    ]
    cells = [
        *[gone, cell("ours", 9.0, 1.0)],
        *[cell("stock", 2.0, 0.0, round=1), cell("ours", 1.0, 1.0, round=1)],
    ]
    for turn, how in enumerate(broken, 2):
        cells += [cell("stock", 2.0, 1.0, round=turn), cell("ours", 0.0, 0.0, round=turn, **how)]
    [row] = rounds.ratios(cells, [("ours", "stock")])
    assert (row["rounds"], row["ttft_ms"]) == (1, {"median": 0.5, "interval": None})
    stock, ours = rounds.medians(cells)
    assert (stock["rounds"], stock["failures"]) == (4, [])
    assert (ours["rounds"], ours["ttft_ms"]["p50"], len(ours["failures"])) == (2, 5.0, 9)
    assert "tpot_ms" not in row
    assert rounds.ratio_line(row).endswith("TPOT -")
    assert rounds.ratios(cells[:1], [("ours", "stock")]) == []


def test_medians_are_taken_figure_by_figure() -> None:
    values = [(1.0, 9.0, 4), (3.0, 7.0, 5), (2.0, 8.0, 8)]
    cells = [cell("ours", ttft, tpot, late=late) for ttft, tpot, late in values]
    [row] = rounds.medians(cells)
    assert row["ttft_ms"]["p50"] == median(ttft for ttft, _, _ in values)
    assert (row["tpot_ms"]["p50"], row["late"], row["clients"]) == (8.0, 5, 8)
