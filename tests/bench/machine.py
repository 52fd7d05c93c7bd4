"""Where a number was measured: the commit and the machine that go beside it."""

import platform
import subprocess
from pathlib import Path

import torch


def commit() -> str:
    """Short hash of the checked-out commit."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """CPU, Python and torch."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{platform.machine()}, {_cpu()}, {versions}"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or "unknown CPU"
