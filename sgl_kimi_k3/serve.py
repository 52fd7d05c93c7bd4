"""`sgl-kimi-k3 serve MODEL [any sglang flag]`: check the combination, show the plan, run SGLang."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_kimi_k3 import compat
from sgl_kimi_k3.config import BACKEND, PREFIX, Options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# What a laptop-sized server needs; stock's defaults take several GB for a toy model.
CPU_DEFAULTS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--attention-backend": "torch_native",
    "--max-running-requests": "16",
    "--max-total-tokens": "65536",
    "--max-mamba-cache-size": "256",
    "--chunked-prefill-size": "2048",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add our options; what the parser does not know is SGLang's."""
    parser.description = "Start SGLang's own server with this backend. Any other flag is SGLang's."
    parser.epilog = "Every option can also be set by environment: KIMI_K3_<NAME>."
    parser.set_defaults(passed_on=[])
    parser.add_argument("model", help="path or name of the model")
    group = parser.add_argument_group("kimi_k3 options (tokens unless said otherwise)")
    for field in fields(Options):
        group.add_argument(
            f"--kimi-k3-{field.name.replace('_', '-')}",
            dest=f"option_{field.name}",
            metavar=field.name.upper(),
            help=f"default {field.default}",
        )


def run(options: argparse.Namespace) -> int:
    """Check versions and options, then serve until told to stop."""
    compat.check_version()
    if options.model.startswith(("/", ".")) and not Path(options.model).exists():
        raise ValueError(
            f"MODEL {options.model}: there is no such folder. Give one with a config.json, or a "
            "name such as moonshotai/Kimi-K3."
        )
    for field in fields(Options):
        value = getattr(options, f"option_{field.name}")
        if value is not None:
            os.environ[f"{PREFIX}{field.name.upper()}"] = value
    Options.from_env(os.environ)  # refuse bad options before anything loads
    return _start(server_argv(options.model, options.passed_on, cuda=_has_cuda()))


def server_argv(model: str, flags: Sequence[str], *, cuda: bool) -> list[str]:
    """SGLang's arguments: the backend, defaults where there is no GPU, then the user's flags.

    >>> server_argv("m", ["--port", "1"], cuda=True)
    ['--model-path', 'm', '--radix-cache-backend', 'kimi_k3', '--port', '1']
    """
    given = {flag.split("=")[0] for flag in flags if flag.startswith("--")}
    defaults = {} if cuda else CPU_DEFAULTS
    chosen = [
        word for flag, value in defaults.items() if flag not in given for word in (flag, value)
    ]
    backend = [] if "--radix-cache-backend" in given else ["--radix-cache-backend", BACKEND]
    return ["--model-path", model, *backend, *chosen, *flags]


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415  # seconds to import, and only a server needs it

    return torch.cuda.is_available()


def _start(argv: list[str]) -> int:
    """Resolve the flags, print the plan, hand over to SGLang."""
    from sglang.launch_server import run_server  # noqa: PLC0415  # SGLang takes seconds to import
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.server_args import prepare_server_args  # noqa: PLC0415
    from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

    from sgl_kimi_k3.memory_plan import plan_of  # noqa: PLC0415

    load_plugins()
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    for line in plan_of(server_args).lines():
        print(f"sgl-kimi-k3: {line}", flush=True)  # noqa: T201  # a command line speaks
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0
