"""What requests that wait share with the one that goes first.

A new prefix is shared as soon as a second request with it waits: no need to compute it twice to
learn that.  So the first leaves a state at its end, and the others wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.tokens import common_len
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from sglang.srt.managers.schedule_batch import Req

ENOUGH = 16  # followers that are compared to the end: more would say the same


def shared_len(ours: Any, theirs: Any, start: int, grid: int, limit: int | None = None) -> int:
    """Common tokens of two prompts (`array('q')`) that are worth a state; 0 if too few.

    That is if they share at least a grid step from `start` on; most do not, and cost little.
    """
    near = slice(start, start + grid)
    if ours[near] != theirs[near]:
        return 0
    shared = common_len(tokens_of(ours, limit), tokens_of(theirs, limit))
    return shared if shared >= start + grid else 0


def worth_a_state(req: Req, waiting: Iterable[Req], grid: int) -> int | None:
    """The depth at which a state that `req` leaves saves most to those `waiting`.

    A multiple of the grid, at least a grid step past what `req` resumes, and below the end of
    every prompt it is for: the last token is always computed.  None if nobody shares as much.
    """
    ours, start, owner = req.full_untruncated_fill_ids, req.prefix_len, namespace_of(req)
    depths: list[int] = []
    for other in waiting:
        theirs = other.origin_input_ids
        if other is req or namespace_of(other) != owner:
            continue
        shared = min(shared_len(ours, theirs, start, grid), len(ours) - 1, len(theirs) - 1)
        depth = shared - shared % grid
        if depth - start >= grid:
            depths.append(depth)
            if len(depths) == ENOUGH:
                break
    return max(
        depths, key=lambda depth: (_saved(depth - start, depth, depths), depth), default=None
    )


def _saved(tokens: int, depth: int, depths: Sequence[int]) -> int:
    return tokens * sum(other >= depth for other in depths)
