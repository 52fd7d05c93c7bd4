"""`sgl-kimi-k3 COMMAND ...`: one line per command here, everything else in the command's module.

A command's module has `configure(parser)`, which adds its arguments, and `run(options) -> int`,
which returns the exit status; a `ValueError` from it is told to the user and ends with status 2.
Only the module of the command asked for is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

from sgl_kimi_k3.compat import IncompatibleError

if TYPE_CHECKING:
    from collections.abc import Sequence

# name -> (module, what it does)
COMMANDS = {
    "serve": ("sgl_kimi_k3.serve", "start SGLang's server with this backend"),
    "plan": ("sgl_kimi_k3.plan.command", "what fits on a GPU, which hit rate to expect"),
    "top": ("sgl_kimi_k3.top", "show a running server in the terminal"),
    "dashboard": ("sgl_kimi_k3.dashboard.command", "show a running server as a web page"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="sgl-kimi-k3", description="Serve Kimi K3 on SGLang with one pool and a sparse tree."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in arguments[:1]:
            importlib.import_module(module).configure(command)
    options, rest = parser.parse_known_args(arguments)
    if "passed_on" in options:  # flags of someone else
        options.passed_on = rest
    elif rest:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = importlib.import_module(COMMANDS[options.command][0]).run(options)
        sys.stdout.flush()
    except (IncompatibleError, ValueError) as error:
        print(f"sgl-kimi-k3: {error}", file=sys.stderr)  # noqa: T201  # a command line speaks
        return 2
    except BrokenPipeError:  # `| head` has read enough; what Python still flushes goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
