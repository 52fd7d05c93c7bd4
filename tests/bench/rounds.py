"""What repeated rounds of a benchmark say: medians, and two servers compared round by round.

Each round runs every server once, next to each other in time, so what the machine does to a round
it does to both; the ratio of the two in one round says more than two medians.  The interval around
the median ratio needs no distribution: it is that of the sign test (order statistics of the sorted
ratios, at least 95 %).
"""

from __future__ import annotations

import math
from statistics import median, median_low
from typing import Any

FEWEST = 6  # rounds: of fewer no interval holds 95 %
COMPARED = ("ttft_ms", "itl_ms", "tpot_ms")


def interval(values: list[float]) -> tuple[float, float] | None:
    """Where the median of what the values are drawn from lies, at 95 %; None for too few."""
    if len(values) < FEWEST:
        return None
    ordered, below, outside = sorted(values), 0, 0.0
    while True:
        outside += 2 * math.comb(len(ordered), below) / 2 ** len(ordered)
        if outside > 0.05:
            return ordered[below - 1], ordered[-below]
        below += 1


def by_load(cells: list[dict]) -> dict[tuple[str, int], dict[str, list[dict]]]:
    """Cells of every load and server, in the order of their rounds."""
    found: dict[tuple[str, int], dict[str, list[dict]]] = {}
    for cell in cells:
        servers = found.setdefault((cell["load"], cell["clients"]), {})
        servers.setdefault(cell["server"], []).append(cell)
    return found


def whole(cell: dict) -> bool:
    """Whether every client played its load: a failed one leaves the others more of the server."""
    return bool(cell.get("requests")) and not cell["failures"] and not cell["dead"]


def medians(cells: list[dict]) -> list[dict]:
    """One row for each server and load: the median of its whole rounds, figure by figure.

    `failures` are those of all its rounds; a server without a whole round has no row.
    """

    def middle(value: Any, rows: list[Any]) -> Any:
        if isinstance(value, dict):
            return {key: middle(value[key], [row[key] for row in rows]) for key in value}
        if isinstance(value, int):  # counts stay whole
            return median_low(rows)
        return median(rows) if isinstance(value, float) else value

    found = []
    for servers in by_load(cells).values():
        for every in servers.values():
            rows = [row for row in every if whole(row)]
            failures = [one for row in every for one in row.get("failures", [])]
            if rows:
                figures = middle(rows[0], rows) | {"failures": failures, "rounds": len(rows)}
                found.append({key: figures[key] for key in figures if key not in {"round", "dead"}})
    return found


def ratios(cells: list[dict], pairs: list[tuple[str, str]]) -> list[dict]:
    """Of each pair (one, other) and load: one's figures over the other's, round by round.

    A row holds, of the p50 of `COMPARED`, the median ratio and its interval (None: too few rounds).
    Rounds that one of the two did not play whole are left out.
    """
    found = []
    for (load, clients), servers in by_load(cells).items():
        for one, other in pairs:
            others = {row["round"]: row for row in servers.get(other, []) if whole(row)}
            both = [
                (row, others[row["round"]])
                for row in servers.get(one, [])
                if whole(row) and row["round"] in others
            ]
            row: dict[str, Any] = {"load": load, "clients": clients, "rounds": len(both)}
            for figure in COMPARED:
                values = [(a[figure]["p50"], b[figure]["p50"]) for a, b in both]
                if both and all(a > 0 < b for a, b in values):
                    each = [a / b for a, b in values]
                    row[figure] = {"median": median(each), "interval": interval(each)}
            if both:
                found.append({"of": one, "to": other, **row})
    return found


def ratio_line(row: dict) -> str:
    """One comparison for people."""

    def told(figure: str) -> str:
        found = row.get(figure)
        if found is None:
            return "-"
        low_high = found["interval"]
        around = " ({:.3f} to {:.3f})".format(*low_high) if low_high else ""
        return f"{found['median']:.3f}{around}"

    figures = "  ".join(f"{name[:-3].upper()} {told(name)}" for name in COMPARED)
    return (
        f"{row['of']} / {row['to']}: {row['load']} {row['clients']} clients, "
        f"{row['rounds']} rounds  {figures}"
    )
