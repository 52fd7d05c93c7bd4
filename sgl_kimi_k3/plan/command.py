"""Arguments of `sgl-kimi-k3 plan`, and the plan they ask for."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sgl_kimi_k3.config import FULL_K3, K3_SPREAD_PAGES, SPREAD_KERNEL, Options
from sgl_kimi_k3.memory_plan import given_bytes
from sgl_kimi_k3.plan import show
from sgl_kimi_k3.plan.capacity import Fits, GpuMemory, IntervalCost, Server
from sgl_kimi_k3.plan.expect import Expected, expect
from sgl_kimi_k3.plan.model import Layout, Model
from sgl_kimi_k3.plan.traffic import FLAGS, Profile, Traffic
from sgl_kimi_k3.serve import CPU_DEFAULTS

if TYPE_CHECKING:
    from mempool import Geometry

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
INTERVALS = (0, 8192, 32768, 131_072)  # shown beside the one asked for
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the command says.

    Attributes:
        source: the config's path.
        server, gpu, geometry: what is started, on which memory, and the arena of one rank.
        context: longest request to serve, in tokens.
        traffic, fits, intervals, expected: what comes, how much of it fits, what states cost,
            which hit rate to expect.
        command: the line to start it with.
        warnings: what to know before using it.
    """

    source: str
    server: Server
    gpu: GpuMemory | None
    geometry: Geometry
    context: int
    traffic: Traffic
    fits: Fits
    intervals: tuple[IntervalCost, ...]
    expected: tuple[Expected, ...]
    command: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Bytes and tokens under the names used in the table."""
        server, geometry = self.server, self.geometry
        state_bytes, token_bytes = server.unit_bytes()
        return {
            "model": {"config": self.source, "architecture": server.model.name},
            "layout": asdict(server.layout) | {"attention_tp": server.layout.attention_tp},
            "state_bytes": state_bytes,
            "token_bytes": token_bytes,
            "block_bytes": geometry.block_bytes,
            "block_tokens": geometry.block_size,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "arena_bytes": geometry.total_bytes,
            "sink_bytes": geometry.sink_bytes,
            "max_states": geometry.max_states,
            "max_blocks": geometry.max_blocks,
            "context": self.context,
            "profile": asdict(self.traffic.profile) | {"ceiling": self.traffic.profile.ceiling},
            "fits": asdict(self.fits),
            "intervals": [asdict(cost) for cost in self.intervals],
            "expected": [asdict(one) for one in self.expected],
            "command": list(self.command),
            "warnings": list(self.warnings),
        }


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "What fits on a GPU, what a checkpoint interval costs and which hit rate to expect, from a "
        "config.json alone. SIZE is bytes, or k, m, g, t of them in powers of 1024: what "
        "nvidia-smi shows as 143771MiB is 143771m, about 140g."
    )
    parser.add_argument("config", help="a model's config.json, or the folder it is in")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")

    memory = parser.add_argument_group("memory: a GPU's, or SGLang's two sizes")
    memory.add_argument("--gpu-memory", type=size, metavar="SIZE", help="of one GPU")
    memory.add_argument(
        "--weight-bytes", type=size, metavar="SIZE", help="on one GPU; else from the config"
    )
    memory.add_argument(
        "--mem-fraction-static", type=float, default=0.85, metavar="F", help="default 0.85"
    )
    memory.add_argument("--max-total-tokens", type=int, metavar="N")
    memory.add_argument("--max-mamba-cache-size", type=int, metavar="N")

    server = parser.add_argument_group("server, under SGLang's names")
    for flag, what in (
        ("--tp", "GPUs that share the model (--tp-size)"),
        ("--dp-attention", "replicas of attention among them (--attn-dp-size)"),
        ("--dcp", "ranks over which the tokens of a KV cache are spread (--dcp-size)"),
    ):
        server.add_argument(flag, type=int, default=1, metavar="N", help=f"{what}; default 1")
    server.add_argument(
        "--page-size",
        type=int,
        metavar="N",
        help="tokens per block of one rank; default 1, or what K3's kernel for --dcp takes",
    )
    server.add_argument("--dtype", default="auto", choices=("auto", *FLOATS))
    server.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
    )
    server.add_argument("--mamba-ssm-dtype", default="auto", choices=("auto", *FLOATS))
    server.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    server.add_argument("--context", type=int, metavar="N", help="longest request (the model's)")
    server.add_argument(
        "--kimi-k3-interval",
        type=int,
        default=Options().interval,
        metavar="N",
        help=f"tokens between states on the grid; 0 = off; default {Options().interval}",
    )

    traffic = parser.add_argument_group("traffic: a profile in tokens, or a trace")
    for name, (flag, what) in FLAGS.items():
        default = getattr(Profile(), name)
        traffic.add_argument(
            flag,
            dest=name,
            type=int,
            metavar="N",
            default=default,
            help=f"{what}; default {default}",
        )
    traffic.add_argument(
        "--conversations", type=int, metavar="N", help="in use at once; default: as many as fit"
    )
    traffic.add_argument("--trace", type=Path, help="of KIMI_K3_TRACE or the simulator, instead")
    traffic.add_argument("--no-simulation", action="store_true", help="leave out the hit rate")


def size(text: str) -> int:
    """Bytes of `141g`, `143771m`, `1.5t` or a plain number.

    >>> size("1.5g")
    1610612736
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 140g, 143771m or bytes")
    return int(float(found[1]) * UNITS[found[2]])


def run(options: argparse.Namespace) -> int:
    """Print the plan; what cannot be is a ValueError that names flag, value and fix."""
    with Console(stderr=True).status("planning"):
        plan = plan_of(options)
    if options.json:
        json.dump(plan.as_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show.table(plan)
    return 0


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan for parsed arguments."""
    model = Model.read(options.config)
    server = Server(
        model,
        Layout(options.tp, options.dp_attention, options.dcp),
        _page_size(options, model),
        options.dtype,
        options.kv_cache_dtype,
        options.mamba_ssm_dtype,
        options.device,
    )
    chosen = Options(interval=options.kimi_k3_interval, grid=_grid(server))
    gpu, geometry = _arena(options, server)
    context = options.context or server.model.context_len
    if not 1 <= context <= server.model.context_len or options.context == 0:
        raise ValueError(
            f"--context {options.context}: must be 1 to {server.model.context_len}, "
            "which the model was made for"
        )
    traffic = Traffic.of(options)
    fits = Fits.of(
        geometry,
        server.layout,
        traffic.profile,
        interval=chosen.interval,
        context=context,
        asked=options.conversations,
    )
    intervals = sorted({*INTERVALS, chosen.interval})
    return Plan(
        source=options.config,
        server=server,
        gpu=gpu,
        geometry=geometry,
        context=context,
        traffic=traffic,
        fits=fits,
        intervals=tuple(IntervalCost.of(geometry, traffic.profile, one) for one in intervals),
        expected=() if options.no_simulation else expect(server, geometry, traffic, fits, chosen),
        command=serve_line(options, server, fits, context),
        warnings=tuple(_warnings(options, server, traffic.profile, fits, context)),
    )


def _page_size(options: argparse.Namespace, model: Model) -> int:
    """The one asked for, if K3's kernel for spread rows can have it."""
    asked: int | None = options.page_size
    if options.dcp == 1 or options.device == "cpu" or model.name != FULL_K3:
        return 1 if asked is None else asked
    if asked not in (None, *K3_SPREAD_PAGES):
        raise ValueError(
            f"--page-size {asked} with --dcp {options.dcp}: SGLang decodes {model.name} with "
            f"cutedsl_mla there, which takes pages of {' or '.join(map(str, K3_SPREAD_PAGES))}"
        )
    return asked or max(K3_SPREAD_PAGES)


def _grid(server: Server) -> int:
    """The default, under DCP the nearest multiple that is made of pages of all ranks."""
    ranks = server.layout.dcp
    return Options().grid if ranks == 1 else math.lcm(Options().grid, server.page_size * ranks)


def _arena(options: argparse.Namespace, server: Server) -> tuple[GpuMemory | None, Geometry]:
    tokens, states = options.max_total_tokens, options.max_mamba_cache_size
    if options.gpu_memory is None:
        if options.device == "cpu":  # what `serve` sets there
            tokens = tokens or int(CPU_DEFAULTS["--max-total-tokens"])
            states = states or int(CPU_DEFAULTS["--max-mamba-cache-size"])
        if tokens is None or states is None:
            raise ValueError(
                "give --gpu-memory SIZE (nvidia-smi --query-gpu=memory.total --format=csv), or "
                "both --max-total-tokens and --max-mamba-cache-size"
            )
        state_bytes, token_bytes = server.unit_bytes()
        total = given_bytes(tokens, states, server.layout.dp, token=token_bytes, state=state_bytes)
        return None, server.geometry(total, "--max-total-tokens or --max-mamba-cache-size")
    if tokens is not None or states is not None:
        raise ValueError(
            "--gpu-memory lets SGLang size the arena; drop --max-total-tokens and "
            "--max-mamba-cache-size, or drop --gpu-memory"
        )
    gpu = GpuMemory.of(
        options.gpu_memory, options.mem_fraction_static, options.weight_bytes, server
    )
    return gpu, server.geometry(gpu.arena_bytes(server), "--mem-fraction-static")


def serve_line(
    options: argparse.Namespace, server: Server, fits: Fits, context: int
) -> tuple[str, ...]:
    """The command that starts what was planned."""
    layout = server.layout
    model = options.config if Path(options.config).is_dir() else "MODEL"
    words: list[str] = ["sgl-kimi-k3", "serve", model]
    pairs = (
        ("--tp-size", layout.tp, 1),
        ("--attn-dp-size", layout.dp, 1),
        ("--dcp-size", layout.dcp, 1),
        ("--page-size", server.page_size, 1),
        ("--dtype", server.dtype, "auto"),
        ("--kv-cache-dtype", server.kv_dtype, "auto"),
        ("--mamba-ssm-dtype", server.ssm_dtype, "auto"),
        (
            "--mem-fraction-static",
            options.mem_fraction_static if options.gpu_memory else None,
            None,
        ),
        ("--max-total-tokens", options.max_total_tokens, None),
        ("--max-mamba-cache-size", options.max_mamba_cache_size, None),
        ("--context-length", min(context, fits.longest_request), server.model.context_len),
        ("--max-running-requests", max(fits.requests, layout.dp), None),
        ("--kimi-k3-interval", options.kimi_k3_interval, Options().interval),
        ("--kimi-k3-grid", _grid(server), Options().grid),
        ("--attention-backend", SPREAD_KERNEL if _takes_flashinfer(server) else None, None),
    )
    words += [str(word) for flag, value, usual in pairs if value != usual for word in (flag, value)]
    if server.model.attn_residual:
        words += ["--trust-remote-code", "--reasoning-parser", "kimi_k3"]
        words += ["--tool-call-parser", "kimi_k3"]
    return (*words, "--enable-metrics", "--enable-cache-report")


def _takes_flashinfer(server: Server) -> bool:
    """Whether `serve` reads spread rows with it; for its own class of K3 SGLang sets kernels."""
    spread = server.layout.dcp > 1 and server.device == "cuda"
    return spread and server.model.name != FULL_K3


def _warnings(
    options: argparse.Namespace, server: Server, profile: Profile, fits: Fits, context: int
) -> list[str]:
    found = []
    layout = server.layout
    if options.gpu_memory and options.weight_bytes is None:
        found.append(
            "weights are worked out from the config's shapes and dtype, the vision tower left out; "
            "--weight-bytes replaces them"
        )
    if fits.longest_request < context:
        found.append(
            f"one request of {context:,} tokens does not fit; the line below asks for "
            f"--context-length {fits.longest_request}"
        )
    if profile.final_len > min(context, fits.longest_request):
        found.append(
            f"a conversation grows to {profile.final_len:,} tokens, which no single request may be"
        )
    if 0 < profile.final_len < options.kimi_k3_interval:
        found.append(
            f"conversations end before the first state on the grid ({options.kimi_k3_interval:,} "
            "tokens): what they reuse are prompt ends, turn ends and junctions"
        )
    if layout.dp > 1:
        found.append(
            f"each of {layout.dp} attention replicas has a cache of its own, and a conversation "
            "must stay on one: see launch/dp_attention.sh"
        )
    elif layout.tp > 8:
        found.append(f"{layout.tp} GPUs are more than one machine: see launch/two_nodes.sh")
    # As resolution does; a test holds the two together.
    refused = []
    if layout.dp > 1 and not server.model.attn_residual and server.device == "cuda":
        refused.append(
            ("--attn-dp-size", layout.dp, "SGLang's Kimi Linear splits states over all GPUs")
        )
    if layout.dcp > 1 and server.device == "cuda" and server.model.name == FULL_K3:
        found.append(
            f"--dcp-size {layout.dcp}: SGLang's kernel for {FULL_K3} there runs on a Blackwell "
            "only; `serve` refuses it elsewhere"
        )
    grid = _grid(server)
    if grid % server.page_size:
        why = f"its pages do not divide the grid of {grid}"
        refused.append(("--page-size", server.page_size, why))
    found += [
        f"these figures hold, but `serve` refuses {flag} {value}: {why}"
        for flag, value, why in refused
    ]
    return found
