"""The plan as tables for people."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from sgl_kimi_k3.memory_plan import size_text

if TYPE_CHECKING:
    from sgl_kimi_k3.plan.command import Plan


def table(plan: Plan, console: Console | None = None) -> None:
    """Print the plan."""
    console = console or Console(highlight=False)
    console.print(_sizes(plan))
    console.print(_fits(plan))
    console.print(_intervals(plan))
    if plan.expected:
        console.print(_expected(plan))
    for warning in plan.warnings:
        console.print(f"note: {warning}", soft_wrap=True)
    console.print("\nStart it with\n", style="bold")
    console.print("  " + shlex.join(plan.command), soft_wrap=True)


def _plain(title: str, *columns: str) -> Table:
    made = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made


def _sizes(plan: Plan) -> Table:
    server, geometry = plan.server, plan.geometry
    layout = server.layout
    state_bytes, token_bytes = server.unit_bytes()
    ranks = f"TP {layout.tp}, {layout.dp} attention replica(s), DCP {layout.dcp}"
    made = _plain(f"{server.model.name} on {ranks}: one rank's memory", "", "bytes", "")
    made.add_row("one KDA state", f"{state_bytes:,}", size_text(state_bytes))
    made.add_row("one token of MLA KV", f"{token_bytes:,}", size_text(token_bytes))
    made.add_row(
        f"one block of {geometry.block_size:,} token(s)",
        f"{geometry.block_bytes:,}",
        f"a state weighs {state_bytes * layout.dcp / token_bytes:,.0f} tokens",
    )
    if plan.gpu is not None:
        gpu = plan.gpu
        made.add_row("GPU", f"{gpu.total:,}", f"{gpu.fraction:.0%} of it for weights and arena")
        origin = "as given" if gpu.weights_known else "estimated from the config"
        made.add_row("weights", f"{gpu.weights:,}", f"{size_text(gpu.weights)}, {origin}")
    made.add_row("arena", f"{geometry.total_bytes:,}", size_text(geometry.total_bytes))
    made.add_row(
        "  holds, of one kind alone",
        f"{geometry.max_states:,} states",
        f"or {geometry.max_blocks * geometry.block_size:,} tokens",
    )
    return made


def _fits(plan: Plan) -> Table:
    fits, profile = plan.fits, plan.traffic.profile
    final = f"{profile.final_len:,}"
    asked = plan.traffic.conversations or fits.conversations
    made = _plain("What fits on the whole server", "", "count")
    made.add_row("tokens of the longest single request", f"{fits.longest_request:,}")
    made.add_row(
        f"requests at once of {plan.context:,} tokens (the context)", f"{fits.context_requests:,}"
    )
    made.add_row(f"requests at once of {final} tokens (a whole conversation)", f"{fits.requests:,}")
    made.add_row("conversations cached, each with its latest state", f"{fits.conversations:,}")
    made.add_row("conversations cached with every state", f"{fits.conversations_all:,}")
    made.add_row(f"checkpoints beside the KV of {asked:,} conversations", f"{fits.checkpoints:,}")
    return made


def _intervals(plan: Plan) -> Table:
    made = _plain(
        f"What an interval costs a conversation of {plan.traffic.profile.final_len:,} tokens",
        *("interval", "states", "bytes", "of its bytes", "worst recompute"),
    )
    for cost in plan.intervals:
        made.add_row(
            f"{cost.interval:,}" if cost.interval else "off",
            f"{cost.states:,}",
            size_text(cost.state_bytes),
            f"+{cost.share:.1%}",
            f"{cost.worst_recompute:,} tokens",
        )
    return made


def _expected(plan: Plan) -> Table:
    made = _plain(
        "Expected hit rate (simulated; the ceiling is an endless memory's)",
        *("in use at once", "interval", "hit rate", "ceiling", "requests"),
    )
    for one in plan.expected:
        made.add_row(
            "trace" if one.conversations is None else f"{one.conversations:,} conversations",
            f"{one.interval:,}" if one.interval else "off",
            f"{one.hit_rate:.1%}",
            f"{one.ceiling:.1%}",
            f"{one.requests:,}" + (f" ({one.refused:,} too long)" if one.refused else ""),
        )
    return made
