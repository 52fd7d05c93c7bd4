"""A tiny trace through the real cache and pool, at four capacities; every state is checked."""

from __future__ import annotations

import json
from pathlib import Path

from tests.oracle.world import World

HERE = Path(__file__).parent
TRACE, COUNTERS = HERE / "chat.jsonl", HERE / "counters.json"
CAPACITIES = (60, 90, 140, 1000)  # blocks beside the sink; a state has the bytes of two
COUNTED = (
    "requests",
    "input_tokens",
    "matched_tokens",
    "resumed_tokens",
    "lost_tokens",
    "hit_tokens",
    "taken",
    "evicted",
    "evicted_tokens",
    "skipped",
    "refused_present",
    "states",
    "blocks",
)


def conversations(path: Path = TRACE) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs as tokens; an output shows in the session's next prompt, if at all."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    following: dict[int, list[int]] = {}
    turns = []
    for number, row in reversed([*enumerate(rows)]):
        size, length = row["block_size"], row["input_length"]
        prompt = [block * size + i for block in row["hash_ids"] for i in range(size)][:length]
        end = length + row["output_length"]
        known, whole = following.get(row["session"], []), length - length % size
        echoed = len(known) >= end and known[:whole] == prompt[:whole]
        if echoed:  # a partial block's id says nothing of its tokens
            prompt[whole:] = known[whole:length]
        output = known[length:end] if echoed else []
        output += range(-1000 * number - 1, -1000 * number - 1 - (end - length - len(output)), -1)
        following[row["session"]] = prompt
        turns.append((prompt, output))
    return turns[::-1]


def replay(blocks: int) -> dict[str, object]:
    """Counters after the whole trace, one request after another."""
    world = World(
        block_size=4, grid=4, interval=64, opportunistic=16, ghost_tokens=2000, states=0,
        blocks=blocks,
    )  # fmt: skip
    for prompt, output in conversations():
        world.serve(prompt, None, output, turn_end=True)
    report = world.cache.report()
    return {name: plain(getattr(report, name)) for name in COUNTED}


def plain(value: object) -> object:
    """Mappings by enum as mappings by name, without zeros."""
    if isinstance(value, int):
        return value
    return {key.value: count for key, count in value.items() if count}


def counted() -> dict[str, object]:
    return {str(blocks): replay(blocks) for blocks in CAPACITIES}
