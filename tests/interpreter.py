"""Kernels in a process of their own: Triton looks for its interpreter when it is imported."""

import os
import subprocess
import sys
from pathlib import Path


def said_by(module: str, *arguments: str, interpreted: bool = True) -> list[str]:
    """Lines that `python -m module` prints; it must end well.

    Without `interpreted` its kernels run on a GPU.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpreted))},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()
