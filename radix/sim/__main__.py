"""`python -m radix.sim TRACE`: replay a trace under policies and capacities; table, JSON, plot."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from radix.sim import cells, model, report
from radix.sim.engine import Rates
from radix.sim.policies import TABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    flags = argparse.ArgumentParser(
        prog="python -m radix.sim",
        description="Replay recorded requests through the server's tree and pool, or others.",
    )
    flags.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, gzipped or not")
    flags.add_argument(
        "--geometry", default="k3-tp8", metavar="k3-tpN|CONFIG.json", help="default: %(default)s"
    )
    flags.add_argument(
        "--tp", type=int, default=8, metavar="N", help="ranks for a CONFIG.json; default: 8"
    )
    flags.add_argument(
        "--capacity",
        default="8g,16g,32g,64g",
        metavar="SIZE,...",
        help="bytes of one rank for KV and states, running and cached; 8g is 8*10^9, 8gi 8*2^30",
    )
    flags.add_argument(
        "--policy", default="ours", metavar="NAME,...|all", help=f"of {', '.join(TABLE)}"
    )
    for name, default, text in (
        ("interval", "32768", "tokens between states on the grid, of `ours`; 0: none"),
        ("opportunistic", "4096", "tokens between states in spare memory, of `ours`; 0: none"),
        ("dense", "0", "tokens between states that cost no cut, of `ours`; 0: each costs one"),
        ("probation", "16", "one in N states is for untried dense ones, of `ours`; 0: none"),
        ("block-size", "1", "tokens per KV block, of `ours`"),
    ):
        flags.add_argument(f"--{name}", default=default, metavar="N,...", help=text)
    flags.add_argument(
        "--prefill-rate", type=int, default=Rates().prefill, metavar="N",
        help="tokens per second of one prefill; default: %(default)s",
    )  # fmt: skip
    flags.add_argument(
        "--decode-rate", type=int, default=Rates().decode, metavar="N",
        help="tokens per second of one answer; default: %(default)s",
    )  # fmt: skip
    flags.add_argument(
        "--coarse", action="store_true",
        help="count a block of the trace as one token, for speed; not for sglang and vllm",
    )  # fmt: skip
    flags.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time")
    flags.add_argument("--json", type=Path, metavar="F", help="write the result")
    flags.add_argument(
        "--plot", type=Path, metavar="F.png", help="draw hit rate over capacity, or over interval"
    )
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for bad input, with one line that says what to change."""
    options = parser().parse_args(arguments)
    try:
        result = cells.run(_plan(options), jobs=options.jobs, progress=report.progress)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    report.table(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    if options.plot is not None:
        report.plot(result, options.plot)
    return 0


def _plan(options: argparse.Namespace) -> cells.Plan:
    """Flags as a plan; checks everything that can be wrong before anything long starts."""
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs} must be at least 1")
    for flag, target in (("--json", options.json), ("--plot", options.plot)):
        if target is not None and not target.resolve().parent.is_dir():
            raise ValueError(f"{flag} {target}: its folder does not exist")
    if options.plot is not None:
        report.require_matplotlib()
    policies = tuple(TABLE) if options.policy == "all" else tuple(options.policy.split(","))
    return cells.Plan(
        trace=options.trace,
        model=model.load(options.geometry, options.tp),
        capacities=tuple(size(text) for text in options.capacity.split(",")),
        policies=policies,
        intervals=_numbers("--interval", options.interval),
        opportunistic=_one("--opportunistic", options.opportunistic),
        dense=_one("--dense", options.dense),
        probation=_one("--probation", options.probation),
        block_size=_one("--block-size", options.block_size),
        coarse=options.coarse,
        rates=Rates(options.prefill_rate, options.decode_rate),
    )


def size(text: str) -> int:
    """Bytes.

    Raises:
        ValueError: not a positive number with an optional unit.

    >>> size("1.5g"), size("2ki")
    (1500000000, 2048)
    """
    digits = text.lower().rstrip("kmgi")
    unit = text.lower()[len(digits) :]
    try:
        value = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError):
        value = 0
    if value < 1:
        raise ValueError(f"--capacity {text}: write bytes as 8g, 512m or 8gi")
    return value


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} {text}: write whole numbers of tokens") from None


def _one(flag: str, text: str) -> int:
    numbers = _numbers(flag, text)
    if len(numbers) != 1:
        raise ValueError(f"{flag} {text}: one number")
    return numbers[0]


if __name__ == "__main__":
    sys.exit(main())
