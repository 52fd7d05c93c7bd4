"""Equal calls give equal answers: in two runs and under two hash seeds."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("script.py")


def answers(seed: int, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_two_runs_and_two_hash_seeds_agree():
    first = answers(1, "0")
    assert len(first) == 64
    assert answers(1, "0") == first
    assert answers(1, "4242") == first
    assert answers(2, "0") != first
