"""The result for people: progress bar, table, plot. rich and matplotlib are the extra `sim`."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_INSTALL = "pip install 'sgl-kimi-k3[sim]'"


def require_matplotlib() -> None:
    """Raise ValueError with the fix if plots cannot be drawn."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ValueError(f"--plot needs matplotlib: {_INSTALL}") from None
    mpl.use("Agg")


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar of requests on stderr; yields the function that moves it."""
    try:
        from rich import progress as bars  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ValueError(f"the simulator's progress bar and table need rich: {_INSTALL}") from None
    with bars.Progress(
        bars.TextColumn("{task.description:>22}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda label, count: bar.update(task, description=label, advance=count)


def table(result: dict[str, Any]) -> None:
    """One row per policy (and interval), one column per capacity."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    cells = result["cells"]
    capacities = sorted({cell["capacity_bytes"] for cell in cells})
    out = Table(title=f"{result['trace']}, {result['geometry']['name']}: token hit rate, %")
    out.add_column("policy")
    for capacity in capacities:
        out.add_column(f"{capacity / 1e9:g} GB", justify="right")
    out.add_column("FLOPs saved, %", justify="right")
    out.add_column("s / cell", justify="right")
    for label, row in rows(result).items():
        rates = {cell["capacity_bytes"]: f"{100 * cell['token_hit_rate']:.1f}" for cell in row}
        saved = [f"{100 * cell['saved_flops_share']:.1f}" for cell in row]
        wall = max(cell["wall_s"] for cell in row)
        out.add_row(label, *(rates.get(c, "=") for c in capacities), " ".join(saved), f"{wall:.1f}")
    Console().print(out)


def rows(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Cells by policy, and by interval where there are several."""
    cells = result["cells"]
    found: dict[str, list[dict[str, Any]]] = {}
    several = {c["policy"] for c in cells for d in cells
               if c["policy"] == d["policy"] and c["interval"] != d["interval"]}  # fmt: skip
    for cell in cells:
        policy = cell["policy"]
        label = f"{policy}, every {cell['interval']:,}" if policy in several else policy
        found.setdefault(label, []).append(cell)
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Hit rate over capacity, a line per policy; over interval, if there are several intervals."""
    require_matplotlib()
    from matplotlib import pyplot as plt  # noqa: PLC0415

    cells = result["cells"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if len({cell["interval"] for cell in cells}) > 1:
        for capacity in sorted({cell["capacity_bytes"] for cell in cells}):
            line = [c for c in cells if c["capacity_bytes"] == capacity]
            positions = [str(c["interval"]) for c in line]
            axes.plot(positions, [100 * c["token_hit_rate"] for c in line], "o-",
                      label=f"{capacity / 1e9:g} GB")  # fmt: skip
        axes.set_xlabel("interval, tokens (0: no states on the grid)")
    else:
        for label, line in rows(result).items():
            if len(line) > 1:
                axes.plot([c["capacity_bytes"] / 1e9 for c in line],
                          [100 * c["token_hit_rate"] for c in line], "o-", label=label)  # fmt: skip
            else:
                axes.axhline(100 * line[0]["token_hit_rate"], ls=":", color="gray", label=label)
        axes.set_xscale("log", base=2)
        ticks = sorted({cell["capacity_bytes"] / 1e9 for cell in cells})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel("capacity of one rank, GB")
    axes.set_ylabel("prompt tokens resumed, %")
    axes.set_title(f"{result['trace']}, {result['geometry']['name']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
