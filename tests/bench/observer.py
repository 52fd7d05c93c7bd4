"""What watching costs the scheduler, off and on, in CPU time beside a scheduling step's own.

    python -m tests.bench.observer [--steps 2000]

The step is SGLang's own request, admission and allocation code over our pool and tree with no
model behind it (`tests/plugin/world.py`): less than any real step, so the shares are upper bounds.
"""

import argparse
import os
import platform
import subprocess
import tempfile
import time

from tests.plugin.test_life import prompt
from tests.plugin.world import World

REPEAT = 2000


def cpu_us(call, repeat: int = REPEAT) -> float:
    """Microseconds of CPU time a call takes."""
    call()
    started = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - started) / repeat * 1e6


def step_us(steps: int) -> float:
    """A step of a load that prefills, decodes, hits and evicts, without recounting anything."""
    world = World(tokens=4000, states=40, check=False)
    world.check = lambda: None
    world._forward = lambda *_: None
    started, taken = time.process_time(), 0
    for user in range(steps):
        req = world.request(prompt(user % 40, 60), new=8)
        while not req.finished() and taken < steps:
            world.step()
            taken += 1
        if taken >= steps:
            break
    return (time.process_time() - started) / taken * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"{platform.machine()}, {os.cpu_count()} cores, commit {commit}")

    step = step_us(steps)
    print(f"{'a scheduling step without a model':58} {step:8.1f} us")
    quiet = World(tokens=4000, states=40, check=False)
    told = World(tokens=4000, states=40, check=False, explain=True)
    matches = []
    for world in (quiet, told):
        world.serve(prompt(1, 60))
        req = world.request(prompt(1, 60))
        world.step()
        matches.append(req)
    off, on = quiet.tree.observer, told.tree.observer

    def show(name: str, cost: float, per: float, unit: str) -> None:
        print(f"{name:58} {cost:8.1f} us {100 * cost / per:6.2f} % {unit}")

    observed = cpu_us(lambda: off.admitted(quiet.tree.cache, matches[0]))
    show("admitted, explain off, per request", observed, step, "of a step")
    explained = cpu_us(lambda: on.admitted(told.tree.cache, matches[1]))
    show("admitted, explain on, per request", explained, step, "of a step")
    off.committed([], [])
    show("stepped, metrics off", cpu_us(off.stepped), step, "of a step")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        from sgl_kimi_k3.metrics import Metrics
        from sgl_kimi_k3.observer import PUBLISH_EVERY_S

        metrics = off.metrics = Metrics(quiet.tree, {"tp_rank": "0", "dp_rank": "0"})
        off._publish_at = float("inf")
        show("stepped, metrics on, not yet due", cpu_us(off.stepped), step, "of a step")

        def publish() -> None:
            quiet.tree.cache.counters.input_tokens += 1
            metrics.publish()

        show("publish", cpu_us(publish), PUBLISH_EVERY_S * 1e6, f"of {PUBLISH_EVERY_S} s")


if __name__ == "__main__":
    main()
