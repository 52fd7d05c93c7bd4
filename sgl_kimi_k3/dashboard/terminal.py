"""One view as text for a terminal: the page's figures, names and colours, drawn with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sgl_kimi_k3.dashboard.names import KINDS, PARTS, SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sgl_kimi_k3.dashboard.view import Json

NONE = "-"  # nothing is known; never shown as a zero
# in the order of the bar
COLOURS = {
    "resumed": "#2bb8a5",
    "new": "#8593a6",
    "diverged": "#a9b4c4",
    "too_short": "#5a6678",
    "no_checkpoint": "#e9b83c",
    "evicted": "#f5834a",
    "refused": "#ec5f8f",
}
# part of the arena -> colour, mark
MARKS = {
    "sink": ("#5a6678", "█"),
    "states_used": ("#8784f2", "█"),
    "states_cached": ("#5f5cc0", "█"),
    "states_holes": ("#8784f2", "░"),
    "gap": ("#5a6678", "·"),
    "kv_holes": ("#55a3f5", "░"),
    "kv_cached": ("#2f6fb0", "█"),
    "kv_used": ("#55a3f5", "█"),
}
BAR = 60  # characters


def screen(view: Json, *, now: float, height: int | None = None) -> RenderableType:
    """One `Watcher.summary`; as many of the last requests as `height` lines have room for."""
    parts: list[RenderableType] = [_head(view, now), *_banners(view)]
    if view["time"] is None:
        return Group(*parts)
    parts += ["", _tiles(view), "", _tokens(view), *_arenas(view), "", _checkpoints(view), ""]
    rows = view["requests"]
    if rows is None:
        parts.append(Text("Start the server with KIMI_K3_EXPLAIN=1 to see each request.", "dim"))
    elif rows:
        room = 8 if height is None else max(2, height - 36)
        parts.append(_requests(rows[:room]))
    return Group(*parts)


def _head(view: Json, now: float) -> Text:
    server, status = view["server"], view["status"]
    colour = "green" if status["state"] == "ok" else "red"
    name = (server["model"] or "").rsplit("/", 1)[-1]
    told = [server["url"], name, f"SGLang {server['version']}" if server["version"] else ""]
    heard = status["heard_at"]
    return Text.assemble(
        ("Kimi K3 cache  ", "bold"),
        ("● ", colour),
        ("live" if status["state"] == "ok" else status["state"], colour),
        (f" {max(0, now - heard):.0f} s ago" if heard else "", "dim"),
        ("  " + " · ".join(part for part in told if part), "dim"),
    )


def _banners(view: Json) -> list[Text]:
    status = view["status"]
    found = []
    if status["message"]:
        found.append(Text(status["message"], "red" if status["state"] != "ok" else "yellow"))
    if status["metrics"] is False:
        told = "The server was started without --enable-metrics: latency and load are not told."
        found.append(Text(told, "yellow"))
    return found + [Text(notice["text"], "yellow") for notice in view["notices"]]


def _tiles(view: Json) -> Table:
    latency, load, rate = view["latency"], view["load"], view["hit_rate"]
    first, between = latency["ttft_s"], latency["itl_s"]
    most = view["limits"].get("running_requests")
    tiles = [
        ("Hit rate", percent(rate["window"]), f"{percent(rate['total'])} in all"),
        ("First token", seconds(first["p50"]), f"p95 {seconds(first['p95'])}"),
        ("Next token", seconds(between["p50"]), f"p95 {seconds(between['p95'])}"),
        ("Prompt tok", per_s(load["prompt_tokens_per_s"]), f"in {_span(view)}"),
        ("Output tok", per_s(load["output_tokens_per_s"]), f"in {_span(view)}"),
        ("Running", count(load["running"]), f"{count(load['queued'])} queued"),
    ]
    if most:
        tiles[-1] = ("Running", f"{count(load['running'])} of {count(most)}", tiles[-1][2])
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(name, "dim") for name, _, _ in tiles))
    table.add_row(
        *(
            Text(value, f"bold {COLOURS['resumed'] if i == 0 else ''}")
            for i, (_, value, _) in enumerate(tiles)
        )
    )
    table.add_row(*(Text(note, "dim") for _, _, note in tiles))
    return table


def _span(view: Json) -> str:
    """How much of the window is known: all of it, or since the first reading."""
    return f"{min(view['window_s'], view['covered_s']):.0f} s"


def _tokens(view: Json) -> Table:
    now, total = view["tokens"]["window"], view["tokens"]["total"]
    table = _table(f"Prompt tokens in {_span(view)}", "Tokens", "Share", "Since start")
    here, ever = ({"resumed": side["resumed"], **side["lost"]} for side in (now, total))
    for key in [*PARTS, *(key for key in ever if key not in PARTS)]:
        if key in ever:
            share = here.get(key, 0) / now["input"] if now["input"] else None
            name = PARTS[key][0] if key in PARTS else key
            label = Text.assemble(("■ ", COLOURS.get(key, "white")), name)
            table.add_row(label, count(here.get(key, 0)), percent(share), count(ever[key]))
    table.add_row("All", count(now["input"]), "", count(total["input"]), style="bold")
    whole = max(1, sum(here.values()))
    shares = [(here.get(key, 0) / whole, colour, "█") for key, colour in COLOURS.items()]
    table.caption, table.caption_justify = _bar(shares), "left"
    return table


def _arenas(view: Json) -> list[RenderableType]:
    found: list[RenderableType] = []
    ranks = view["arena"]["ranks"]
    for one in ranks:
        total = one["total_bytes"]
        bar = _bar([(part["bytes"] / total, *MARKS[part["part"]]) for part in one["segments"]])
        sizes: dict[str, tuple[str, int]] = {}
        for part in one["segments"]:
            key = "holes" if part["part"].endswith("holes") else part["part"]
            sizes[key] = (MARKS[part["part"]][0], sizes.get(key, ("", 0))[1] + part["bytes"])
        legend = Columns(
            Text.assemble(("■ ", colour), f"{SEGMENTS[key][0]} ", (size(amount), "bold"))
            for key, (colour, amount) in sizes.items()
        )
        states, kv = count(one["states"]["more"]), count(one["kv_tokens"]["more"])
        room = Text(f"Room for {states} more states or {kv} more tokens, nothing evicted.", "dim")
        name = f"Memory of dp {one['rank']['dp']} " if len(ranks) > 1 else "Memory "
        ends = ("  KDA states from the left, MLA KV from the right", "dim")
        found += ["", Text.assemble((name, "bold"), (size(total), "dim"), ends), bar, legend, room]
    return found


def _checkpoints(view: Json) -> Table:
    table = _table("Checkpoints since start", "Held", "Taken", "Evicted", "Refused", "Resumed")
    told, hits = view["checkpoints"], view["tokens"]["total"]["hits"]
    for kind in [*KINDS, *(kind for kind in told["taken"] if kind not in KINDS)]:
        numbers = [told[name].get(kind, 0) for name in ("taken", "evicted", "refused")]
        held = NONE if told["held"] is None else count(told["held"].get(kind, 0))
        row = [held, *map(count, numbers), count(hits.get(kind, 0))]
        table.add_row(KINDS[kind][0] if kind in KINDS else kind, *row)
    return table


def _requests(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title="Last requests", title_justify="left")
    for name in ("Prompt", "Resumed"):
        table.add_column(name, justify="right", style="none", header_style="dim")
    table.add_column("What happened", header_style="dim", overflow="fold")
    for row in rows:
        share = row["resumed"] / row["prompt_tokens"]
        table.add_row(count(row["prompt_tokens"]), percent(share), Text(row["text"], "dim"))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(title, header_style="bold", min_width=24, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", header_style="dim", min_width=8)
    return table


def _bar(shares: Sequence[tuple[float, str, str]]) -> Text:
    """Shares as characters; the rounding is carried on, so that the length is right."""
    bar, done, drawn = Text(), 0.0, 0
    for share, colour, mark in shares:
        done += share
        length = round(done * BAR) - drawn
        drawn += length
        bar.append(mark * length, colour)
    return bar


def count(number: float | None) -> str:
    """Grouped by thousands."""
    return NONE if number is None else f"{number:,.0f}"


def percent(share: float | None) -> str:
    """With one decimal."""
    return NONE if share is None else f"{share:.1%}"


def seconds(value: float | None) -> str:
    """Milliseconds below one second."""
    if value is None:
        return NONE
    return f"{value * 1000:.{0 if value >= 0.01 else 1}f} ms" if value < 1 else f"{value:.2f} s"


def per_s(value: float | None, unit: str = "") -> str:
    """A rate."""
    if value is None:
        return NONE
    return f"{value:,.{1 if value < 100 else 0}f}{' ' if unit else ''}{unit}/s"


def size(value: float) -> str:
    """Bytes in binary units."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while value >= 1024 and power < len(units) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.0f} {units[power]}" if power == 0 else f"{value:.1f} {units[power]}"
