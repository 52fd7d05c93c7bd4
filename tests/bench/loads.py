"""The loads that `serve` puts on its servers, and how they are named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench import load

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Load:
    """One closed loop; without a trace answers alone; `fresh`: on an empty cache."""

    name: str
    trace: str
    clients: int
    sessions: int
    longest: int = 32_768
    pace_s: float = 0.0
    fresh: bool = True

    def play(self, url: str, traces: Path, seconds: float, turn: int) -> dict:
        """Its figures on one server, in one round."""
        if not self.trace:
            return load.decode_only(url, clients=self.clients, seed=turn)
        return load.run(
            url,
            traces / f"{self.trace}.jsonl.gz",
            clients=self.clients,
            count=self.sessions,
            longest=self.longest,
            seconds=seconds,
            pace_s=self.pace_s,
        )


PRESSED = (
    Load("airline", "airline-chat", 1, 4),
    Load("airline", "airline-chat", 8, 24),
    Load("airline", "airline-chat", 32, 96),
    Load("airline", "airline-chat", 64, 160),
    Load("agentic", "agentic-coding", 8, 24, 65_536),
    Load("agentic", "agentic-coding", 32, 78, 65_536),
    Load("agentic", "agentic-coding", 64, 78, 65_536),
    Load("full", "", 32, 32, fresh=False),
)
ROOMY = (
    *(Load("decode", "", clients, clients) for clients in (1, 8, 32)),
    Load("roomy", "airline-chat", 8, 24),
    Load("roomy", "airline-chat", 32, 64),
    Load("paced", "airline-chat", 32, 64, pace_s=2.0),
)
SHORT = Load("short", "airline-chat", 192, 192, 2_200)


def chosen(names: str | None, clients: str) -> list[Load]:
    """All loads of so many `clients`, or those named; comma between.

    A name is `paced`, for each of `clients` that it has, or `paced:32`.  One of nothing is refused.
    """
    known = (*PRESSED, *ROOMY)
    counts = {int(n) for n in clients.split(",")}
    if names is None:
        return [one for one in known if one.clients in counts]
    wanted = {
        name: [
            one
            for one in known
            if f"{one.name}:{one.clients}" == name or (one.name == name and one.clients in counts)
        ]
        for name in names.split(",")
    }
    nothing = ",".join(name for name, loads in wanted.items() if not loads)
    if nothing:
        raise SystemExit(
            f"--loads {nothing} with --clients {clients} names none of "
            + ", ".join(f"{one.name}:{one.clients}" for one in known)
        )
    found = [one for one in known if any(one in loads for loads in wanted.values())]
    if not all(one.fresh or any(two in PRESSED and two.fresh for two in found) for one in found):
        raise SystemExit("--loads full needs a load that fills the arena: add agentic:32")
    return found
