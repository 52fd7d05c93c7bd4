"""What requests that wait share with the one that goes first.

A new prefix is shared as soon as a second request with it waits: no need to compute it twice to
learn that.  So the first leaves a state at its end, and the others wait for it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from radix.tokens import common_len
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from sglang.srt.managers.schedule_batch import Req

    from radix import TokenArray

ENOUGH = 16  # followers that are compared to the end: more would say the same


def near(ours: Any, theirs: Any, start: int, grid: int) -> bool:
    """Whether two prompts (`array('q')`) may share a grid step from `start` on; most do not."""
    step = slice(start, start + grid)
    return bool(ours[step] == theirs[step])


def worth_a_state(req: Req, waiting: Iterable[Req], grid: int) -> int | None:
    """The depth at which a state that `req` leaves saves most to those `waiting`.

    A multiple of the grid, at least a grid step past what `req` resumes, and below the end of
    every prompt it is for: the last token is always computed.  None if nobody shares as much.
    """
    ids, start, owner = req.full_untruncated_fill_ids, req.prefix_len, namespace_of(req)
    alike = (
        other.origin_input_ids
        for other in waiting
        if other is not req
        and near(ids, other.origin_input_ids, start, grid)
        and namespace_of(other) == owner
    )
    ours: TokenArray | None = None
    depths: list[int] = []
    for theirs in itertools.islice(alike, ENOUGH):
        ours = tokens_of(ids) if ours is None else ours
        shared = min(common_len(ours, tokens_of(theirs)), len(ours) - 1, len(theirs) - 1)
        depth = shared - shared % grid
        if depth - start >= grid:
            depths.append(depth)

    def saved(depth: int) -> int:
        return (depth - start) * sum(other >= depth for other in depths)

    return max(depths, key=lambda depth: (saved(depth), depth), default=None)
