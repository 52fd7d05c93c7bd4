"""What the chat measured: lines of the table, checks, JSON. Pure functions over `Turn`s."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ARENA = re.compile(r'^kimi_k3:arena_bytes\{[^}]*part="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of one user.

    Attributes:
        prompt_ids: the rendered prompt.
        output_ids: the sampled tokens; the last one was never fed through the model.
        cached_tokens: tokens of the prompt that were not computed again.
        ttft_s: seconds from sending the request to the first text.
        user: from 1.
        turn: from 1.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    cached_tokens: int
    ttft_s: float
    user: int = 0
    turn: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"user {self.user} turn {self.turn}"

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    def of(self, user: int, turn: int) -> "Turn":
        """The same measurement, as this user's turn."""
        return dataclasses.replace(self, user=user, turn=turn)


def header() -> str:
    """Column names of `line`."""
    return f"{'user':>4} {'turn':>4} {'prompt':>7} {'cached':>7} {'hit':>7} {'TTFT':>9}"


def line(turn: Turn) -> str:
    """One row of the table."""
    share = turn.cached_tokens / turn.prompt_tokens
    return (
        f"{turn.user:4d} {turn.turn:4d} {turn.prompt_tokens:7d} {turn.cached_tokens:7d} "
        f"{share:7.1%} {turn.ttft_s * 1000:6.0f} ms"
    )


def hit_rate(turns: Sequence[Turn]) -> float:
    """Cached tokens over prompt tokens."""
    return sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns)


def differences(left: Sequence[Turn], right: Sequence[Turn]) -> list[str]:
    """Turns whose sampled tokens differ between two runs of the same chat."""
    assert [t.name for t in left] == [t.name for t in right], "runs of different chats"
    found = []
    for a, b in zip(left, right, strict=True):
        same = common_len(a.output_ids, b.output_ids)
        if same < max(len(a.output_ids), len(b.output_ids)):
            found.append(f"{a.name}: sampled tokens differ from position {same} of the reply on")
    return found


def resume_problems(turns: Sequence[Turn], end_of_msg: int, grid: int) -> list[str]:
    """Turns that computed more than they should have.

    Turn 2 and later must hold the whole previous turn as a prefix and resume within one grid step
    of its end; the first turn of the second user and later, within one grid step of the end of the
    leading system messages, which is all that it shares with the users before.
    """
    problems = []
    previous: dict[int, Turn] = {}
    first = turns[0]
    for turn in turns:
        before = previous.get(turn.user)
        if before is not None:
            # The last sampled token ended the turn unfed: no state or KV of it exists.
            history = before.prompt_ids + before.output_ids[:-1]
            reachable = common_len(history, turn.prompt_ids)
            if reachable < len(history):
                problems.append(
                    f"{turn.name}: the prompt parts from the previous turn at {reachable} "
                    f"of {len(history)} tokens"
                )
        elif turn is not first:
            shared = turn.prompt_ids[: common_len(first.prompt_ids, turn.prompt_ids)]
            reachable = len(shared) - tuple(reversed(shared)).index(end_of_msg)
        else:
            reachable = 0
        if turn.cached_tokens < reachable - grid:
            problems.append(
                f"{turn.name}: resumed at {turn.cached_tokens}, should be within {grid} "
                f"tokens of {reachable}"
            )
        previous[turn.user] = turn
    return problems


def common_len(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> common_len([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def server_summary(info: dict[str, Any], metrics: str) -> dict[str, Any]:
    """What answered: version, tree, and the bytes of the pool by part.

    Args:
        info: SGLang's `/server_info`.
        metrics: the text of `/metrics`.
    """
    arena = {part: int(float(value)) for part, value in _ARENA.findall(metrics)}
    return {
        "sglang_version": info.get("version"),
        "radix_cache": info.get("radix_cache_backend"),
        "pool": {"name": "mempool", "bytes": arena} if arena else {"name": "sglang"},
    }


def write_json(
    path: Path,
    turns: Sequence[Turn],
    *,
    outputs_equal: bool,
    server: dict[str, Any],
) -> None:
    """Write the run's result."""
    rows = [
        {
            "user": t.user,
            "turn": t.turn,
            "prompt_tokens": t.prompt_tokens,
            "cached_tokens": t.cached_tokens,
            "ttft_s": round(t.ttft_s, 4),
        }
        for t in turns
    ]
    result = {
        "hit_rate": round(hit_rate(turns), 4),
        "outputs_equal": outputs_equal,
        "turns": rows,
        "server": server,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
