"""The Grafana dashboard as code.  `python launch/dashboards/kimi_k3.py` writes kimi_k3.json.

Every query of ours says `max without (tp_rank)`: tensor-parallel ranks keep the same tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos, VariableOption

K3 = "kimi_k3:"
FILE = Path(__file__).with_suffix(".json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
Panel = timeseries.Panel | stat.Panel
Rows = Iterator[tuple[int, list[Panel]]]  # height of a row, and its panels
Query = tuple[str, str]  # expression, legend


def level(name: str) -> str:
    """A gauge, once per tree."""
    return f'max without (tp_rank) ({name}{{instance=~"$instance"}})'


def rate(name: str) -> str:
    """A counter's growth per second, once per tree."""
    return f'max without (tp_rank) (rate({name}{{instance=~"$instance"}}[$window]))'


def per(label: str, inner: str) -> str:
    """Summed over everything else."""
    return f"sum by ({label}) ({inner})"


def ratio(part: str, whole: str) -> str:
    """A ratio of sums, so that one small miss cannot pull it to zero."""
    return f"sum({rate(part)}) / sum({rate(whole)})"


def quantile(q: float, histogram: str) -> str:
    """A quantile of a histogram over the window."""
    return f"histogram_quantile({q}, {per('le', rate(histogram + '_bucket'))})"


HIT_RATE = ratio("kimi_k3:resumed_tokens_total", "kimi_k3:input_tokens_total")
KNOWN = ratio("kimi_k3:matched_tokens_total", "kimi_k3:input_tokens_total")
RUNNING = f"sum({level('sglang:num_running_reqs')})"
QUEUED = f"sum({level('sglang:num_queue_reqs')})"


def number(title: str, text: str, expr: str, unit: str = "short") -> stat.Panel:
    """One figure, with its history behind it."""
    panel = stat.Panel().title(title).description(text).datasource(SOURCE).unit(unit)
    if unit == "percentunit":
        panel = panel.min(0).max(1)
    return (
        panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_mode(kinds.BigValueColorMode.VALUE)
        .graph_mode(kinds.BigValueGraphMode.AREA)
        .with_target(_target(expr, "", "A"))
    )


def lines(
    title: str, text: str, *queries: Query, unit: str = "short", stacked: bool = False
) -> timeseries.Panel:
    """Lines over time; `stacked` where the parts add up."""
    panel = timeseries.Panel().title(title).description(text).datasource(SOURCE).unit(unit).min(0)
    if unit == "percentunit":
        panel = panel.max(1)
    mode = kinds.StackingMode.NORMAL if stacked else kinds.StackingMode.NONE
    panel = (
        panel.stacking(common.StackingConfig().mode(mode))
        .fill_opacity(60 if stacked else 8)
        .line_width(1)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(kinds.TooltipDisplayMode.MULTI)
            .sort(kinds.SortOrder.DESCENDING)
        )
    )
    for position, (expr, legend) in enumerate(queries):
        panel = panel.with_target(_target(expr, legend, "ABCDEF"[position]))
    return panel


def _target(expr: str, legend: str, ref: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref)
    return query.datasource(SOURCE).range()


def overview() -> Rows:
    """How it stands now."""
    yield (
        5,
        [
            number(
                "Token hit rate",
                "Prompt tokens not computed again, over the window.",
                HIT_RATE,
                "percentunit",
            ),
            number(
                "Known prefix",
                "Prompt tokens that were known. What lies between this and the hit rate had no "
                "state or no KV left.",
                KNOWN,
                "percentunit",
            ),
            number("Running requests", "", RUNNING),
            number("Queued requests", "", QUEUED),
            number(
                "Available states",
                "That fit if everything evictable were evicted; 0 with a queue is starvation.",
                f"sum({level(K3 + 'available_states')})",
            ),
            number("Arena", "All parts together.", f"sum({level(K3 + 'arena_bytes')})", "bytes"),
        ],
    )


def reuse() -> Rows:
    """Where the prompts' tokens went."""
    yield (
        8,
        [
            lines(
                "Token hit rate over the window",
                "Resumed and known prompt tokens over all prompt tokens.",
                (HIT_RATE, "resumed"),
                (KNOWN, "known"),
                unit="percentunit",
            ),
            lines(
                "Lost tokens by reason",
                "Prompt tokens computed per second, by why they were not resumed.",
                (per("reason", rate(K3 + "lost_tokens_total")), "{{reason}}"),
                stacked=True,
            ),
        ],
    )
    yield (
        8,
        [
            lines(
                "Hit tokens by checkpoint kind",
                "Resumed tokens per second, by the kind of checkpoint resumed from.",
                (per("kind", rate(K3 + "hit_tokens_total")), "{{kind}}"),
                stacked=True,
            ),
            lines(
                "Bytes of the arena",
                "States, KV, their holes, the gap and the sink add up to the arena.",
                (per("part", level(K3 + "arena_bytes")), "{{part}}"),
                unit="bytes",
                stacked=True,
            ),
        ],
    )


def checkpoints() -> Rows:
    """What was kept, and for how long."""
    by_kind = "{{kind}} ({{cause}})"
    yield (
        8,
        [
            lines(
                "Checkpoints taken",
                "Per second, by kind.",
                (per("kind", rate(K3 + "checkpoints_taken_total")), "{{kind}}"),
            ),
            lines(
                "Checkpoints refused",
                "Per second, by kind and cause: one was present, or no memory could be had.",
                (per("kind, cause", rate(K3 + "checkpoints_refused_total")), by_kind),
            ),
            lines(
                "Checkpoints evicted",
                "Per second, by kind and what needed the room.",
                (per("kind, cause", rate(K3 + "checkpoints_evicted_total")), by_kind),
            ),
        ],
    )
    yield (
        8,
        [
            lines(
                "Age of states at a hit",
                "Time since a state was kept or last used when a request resumed from it.",
                *(
                    (quantile(q, K3 + "hit_age_seconds"), f"p{q * 100:.0f}")
                    for q in (0.5, 0.9, 0.99)
                ),
                unit="s",
            ),
            lines(
                "Age of states at eviction",
                "If states are evicted younger than they are hit, the arena is too small.",
                *(
                    (quantile(q, K3 + "eviction_age_seconds"), f"p{q * 100:.0f}")
                    for q in (0.1, 0.5)
                ),
                unit="s",
            ),
            lines(
                "Evicted KV",
                "Tokens per second, by what needed the room.",
                (per("cause", rate(K3 + "evicted_kv_tokens_total")), "{{cause}}"),
            ),
        ],
    )


def memory() -> Rows:
    """The arena."""
    yield (
        8,
        [
            lines(
                "Peak of the two ends",
                "Most bytes an end of the arena ever spanned.",
                (per("side", level(K3 + "peak_bytes")), "{{side}}"),
                unit="bytes",
            ),
            lines(
                "Moved to close holes",
                "Bytes per second.",
                (f"sum({rate(K3 + 'moved_bytes_total')})", "bytes"),
                unit="Bps",
            ),
            lines(
                "Room for more",
                "What fits if everything evictable were evicted.",
                (f"sum({level(K3 + 'available_states')})", "states"),
                (f"sum({level(K3 + 'available_blocks')})", "KV blocks"),
            ),
        ],
    )
    yield (
        8,
        [
            lines(
                "Retracted requests",
                "Running requests per second that had to give their memory back.",
                (f"sum({rate(K3 + 'retracted_requests_total')})", "retracted"),
            ),
            lines(
                "Ghost tokens",
                "Tokens remembered without bytes: the evidence for a second sight.",
                (f"sum({level(K3 + 'ghost_tokens')})", "ghost tokens"),
            ),
            lines(
                "States and blocks",
                "Handed out: to running requests and to the tree.",
                (f"sum({level(K3 + 'live_states')})", "states"),
                (f"sum({level(K3 + 'live_blocks')})", "KV blocks"),
                (f"sum({level(K3 + 'pins')})", "pinned paths"),
            ),
        ],
    )


def service() -> Rows:
    """What clients see, and what the server was told."""
    yield (
        8,
        [
            lines(
                "Running and queued",
                "Held back: until their room costs nobody the states he comes back for.",
                (RUNNING, "running"),
                (QUEUED, "queued"),
                (f"sum({level(K3 + 'held_now')})", "held back"),
                (f"max({level(K3 + 'most_overtaken')})", "most overtaken, ever"),
            ),
            lines(
                "Time to first token",
                "",
                *(
                    (quantile(q, "sglang:time_to_first_token_seconds"), f"p{q * 100:.0f}")
                    for q in (0.5, 0.9, 0.99)
                ),
                unit="s",
            ),
            lines(
                "Limits",
                "As asked for at launch (0: not) and in force.",
                (per("limit, value", level(K3 + "limits")), "{{limit}} {{value}}"),
            ),
            lines(
                "Eviction policy",
                "lost_share: of conversations' latest ends, the part already gone when wanted.",
                (f"max by (number) ({level(K3 + 'policy')})", "{{number}}"),
            ),
        ],
    )


def build() -> dashboard.Dashboard:
    """The whole dashboard; the panels of a row share 24 columns evenly."""
    board = (
        dashboard.Dashboard("Kimi K3 cache and memory")
        .uid("kimi-k3")
        .tags(["sglang", "kimi-k3"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(
            dashboard.QueryVariable("instance")
            .label("Server")
            .datasource(SOURCE)
            .query("label_values(kimi_k3:arena_bytes, instance)")
            .include_all(True)
            .all_value(".+")
            .multi(True)
            .current(VariableOption(text="All", value="$__all"))
        )
        .with_variable(
            dashboard.CustomVariable("window")
            .label("Window")
            .values("1m,5m,15m,1h,6h")
            .current(VariableOption(text="5m", value="5m"))
        )
    )
    top, serial = 0, 0
    for height, panels in chain(overview(), reuse(), checkpoints(), memory(), service()):
        width = 24 // len(panels)
        for column, panel in enumerate(panels):
            serial += 1
            place = GridPos(x=column * width, y=top, w=width, h=height)
            board = board.with_panel(panel.id(serial).grid_pos(place))
        top += height
    return board


def text() -> str:
    """The file's content."""
    return JSONEncoder(sort_keys=True, indent=1).encode(build().build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
