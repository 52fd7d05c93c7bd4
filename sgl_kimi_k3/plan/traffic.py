"""What users send: a turn profile, and the trace it stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from radix import IdArray
    from radix.sim.trace import Request

BLOCK = 64  # tokens per id in the traces made here
TYPING_MS = 30_000  # mean pause of a user between a reply and the next turn
FLAGS = {
    "prompt": ("--prompt-tokens", "first prompt, shared prefix included"),
    "shared": ("--shared-prefix", "what every conversation starts with"),
    "turn": ("--turn-tokens", "new input of each later turn"),
    "output": ("--output-tokens", "each reply"),
    "turns": ("--turns", "requests of one conversation"),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A conversation as its users have it; all lengths in tokens.

    Attributes:
        prompt: first prompt, the shared prefix included.
        shared: how much of it every conversation starts with (tools, system prompt).
        turn: new input of each later turn.
        output: each reply, which the next prompt repeats.
        turns: requests of one conversation.

    Raises:
        ValueError: a length that cannot be.
    """

    prompt: int = 12_000
    shared: int = 8_000
    turn: int = 1_500
    output: int = 500
    turns: int = 16

    def __post_init__(self) -> None:
        least = (("prompt", 2), ("shared", 0), ("turn", 1), ("output", 1), ("turns", 1))
        for name, low in least:
            if getattr(self, name) < low:
                raise ValueError(f"{FLAGS[name][0]} {getattr(self, name)}: must be at least {low}")
        if self.shared >= self.prompt:
            raise ValueError(
                f"--shared-prefix {self.shared} must be below --prompt-tokens {self.prompt}, "
                "which includes it"
            )

    def prompt_len(self, turn: int) -> int:
        """Prompt of one turn, counted from 0: everything said before is in it."""
        return self.prompt + turn * (self.turn + self.output)

    @property
    def final_len(self) -> int:
        """A conversation's length when its last reply is done."""
        return self.prompt_len(self.turns - 1) + self.output

    @property
    def own_len(self) -> int:
        """The part of it that no other conversation has."""
        return self.final_len - self.shared

    @property
    def ceiling(self) -> float:
        """Hit rate of an endless memory: all but the first request's own part and new turns."""
        total = sum(self.prompt_len(turn) for turn in range(self.turns))
        return 1 - (self.prompt - self.shared + (self.turns - 1) * self.turn) / total

    def lines(self, conversations: int, seed: int = 0) -> Iterator[str]:
        """A trace: so many users at once, each with one conversation after the other.

        Users start within one turn's pause of each other and pause an exponential time before each
        turn. Each has two conversations, so that the second meets a warm cache.
        """
        draw = np.random.default_rng(seed)
        rows = []
        for user in range(conversations):
            now = float(draw.uniform(0, TYPING_MS))
            for half in range(2):
                name = 2 * user + half
                for turn in range(self.turns):
                    rows.append((int(now), name, turn))
                    now += float(draw.exponential(TYPING_MS)) + 20.0 * self.output
        for stamp, name, turn in sorted(rows):
            yield json.dumps(
                {
                    "timestamp": stamp,
                    "session": name,
                    "input_length": self.prompt_len(turn),
                    "output_length": self.output,
                    "block_size": BLOCK,
                    "hash_ids": self._ids(name, self.prompt_len(turn)),
                    "boundaries": [self.shared] if self.shared else [],
                }
            )

    def _ids(self, conversation: int, length: int) -> list[int]:
        """Blocks of a prompt: those that lie in the shared prefix, then the conversation's own."""
        blocks, common = -(-length // BLOCK), self.shared // BLOCK
        first = 1 + common + conversation * -(-self.final_len // BLOCK)
        return [*range(1, common + 1), *range(first, first + blocks - common)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A profile, and the trace it was taken from if there is one."""

    profile: Profile
    conversations: int | None = None
    trace: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Traffic:
        """From parsed arguments.

        Raises:
            ValueError: a profile that cannot be, or a trace that cannot be read.
        """
        if options.conversations is not None and options.conversations < 1:
            raise ValueError(f"--conversations {options.conversations}: must be at least 1")
        if options.trace is None:
            profile = Profile(**{name: getattr(options, name) for name in FLAGS})
            return cls(profile, options.conversations)
        return cls(profile_of(options.trace), options.conversations, options.trace)


def profile_of(path: Path) -> Profile:
    """The median conversation of a trace; requests without a session are conversations of one.

    Shared is what the first prompts of half of all conversations have in common with another's.
    """
    from radix.sim.trace import read  # noqa: PLC0415  # only where a trace is given

    trace = read(path)
    sessions: dict[object, list[Request]] = {}
    for request in trace.requests:
        key = (request.number,) if request.session is None else request.session
        sessions.setdefault(key, []).append(request)
    firsts = [requests[0] for requests in sessions.values()]
    output = round(np.mean([request.output_len for request in trace.requests]))
    turns = round(np.median([len(requests) for requests in sessions.values()]))
    growth = [
        (requests[-1].prompt_len - requests[0].prompt_len) / (len(requests) - 1)
        for requests in sessions.values()
        if len(requests) > 1
    ]
    prompt = max(round(np.median([first.prompt_len for first in firsts])), 2)
    common = [
        _common(first.ids, before.ids) * first.block_size
        for first, before in zip(firsts[1:], firsts, strict=False)
    ]
    shared = round(np.median(common)) if common else 0
    turn = round(np.median(growth)) - output if growth else 1
    return Profile(prompt, min(shared, prompt - 1), max(turn, 1), max(output, 1), turns)


def _common(left: IdArray, right: IdArray) -> int:
    width = min(left.size, right.size)
    differs = np.flatnonzero(left[:width] != right[:width])
    return int(differs[0]) if differs.size else width
