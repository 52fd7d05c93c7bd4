"""The servers of a benchmark: whoever is measured gets the same cores."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.bench import loads
from tests.bench.servers import Server, take_stage

CHILD = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(1)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-uc', {CHILD!r}])"


@pytest.fixture
def pair() -> Iterator[tuple[Server, Server]]:
    """Two with a core of their own, each a process, its child and a thread of that."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one core")
    made = [Server(str(core), Path("config.json"), "", 0, cores=(core,)) for core in allowed[:2]]
    for server in made:
        server.process = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True
        )
        assert server.process.stdout is not None
        server.process.stdout.readline()
        server.move(server.cores)
    yield made[0], made[1]
    for server in made:
        server.stop()


def cores_of(server: Server) -> set[int]:
    """Where its threads may run."""
    assert server.process is not None
    main = psutil.Process(server.process.pid)
    threads = [
        thread.id for one in (main, *main.children(recursive=True)) for thread in one.threads()
    ]
    assert len(threads) == 3
    return {core for thread in threads for core in os.sched_getaffinity(thread)}


def test_the_measured_one_has_the_first_cores(pair: tuple[Server, Server]) -> None:
    first, second = pair
    stage, other = first.cores, second.cores
    for server, waiting in ((second, first), (second, first), (first, second)):
        take_stage(server, pair)
        assert (server.cores, cores_of(server)) == (stage, set(stage))
        assert (waiting.cores, cores_of(waiting)) == (other, set(other))


def test_servers_without_cores_of_their_own_stay_where_they_are() -> None:
    shared = [Server(name, Path("config.json"), "", 0) for name in "ab"]
    take_stage(shared[1], shared)
    assert [server.cores for server in shared] == [(), ()]


def test_loads_are_chosen_by_name_and_clients() -> None:
    def chosen(names: str | None, clients: str = "1,8,32,64") -> list[tuple[str, int]]:
        return [(one.name, one.clients) for one in loads.chosen(names, clients)]

    assert chosen("decode,agentic:32", "1,8") == [("agentic", 32), ("decode", 1), ("decode", 8)]
    assert chosen(None, "1") == [("airline", 1), ("decode", 1)]
    assert chosen("paced,full,airline:1") == [("airline", 1), ("full", 32), ("paced", 32)]
    with pytest.raises(SystemExit, match=r"--loads chat,agentic:9 with .* none of airline:1, air"):
        chosen("chat,paced,agentic:9")
    with pytest.raises(SystemExit, match=r"--loads paced with --clients 8 names none of"):
        chosen("paced", "8")
    with pytest.raises(SystemExit, match="--loads full needs a load that fills the arena"):
        chosen("full,roomy")
