"""What to keep: the depths at which a prefill should leave a state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.values import Kind, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from radix.values import CacheConfig, Match

_GROWTH = 16  # opportunistic gaps double after this many, so a gap is at most 1/8 of its depth
_DENSE_SHARE = 4  # dense states take at most one part in so many of what is free,
_DENSE_MOST = 256  # and no more than this, which bounds what a prompt costs the tree


def grid_depths(step: int, start: int, end: int) -> range:
    """Multiples of `step` in (start, end).

    >>> list(grid_depths(4, 4, 12))
    [8]
    """
    return range(start - start % step + step, end, step)


def opportunistic_depths(step: int, start: int, end: int) -> list[int]:
    """Depths in (start, end) whose gaps grow with depth, the same for every prompt.

    Multiples of `step` up to 16 steps, then of twice the step up to 32 steps, and so on: a shared
    prefix of any length d is covered to within max(step, d/8), with O(log d) states.

    >>> opportunistic_depths(1, 30, 40)
    [32, 36]
    """
    depths: list[int] = []
    lower, gap = 0, step
    upper = _GROWTH * step
    while lower < end:
        depths.extend(d for d in grid_depths(gap, max(start, lower - 1), end) if d < upper)
        lower, upper, gap = upper, 2 * upper, 2 * gap
    return depths


def _opportunistic_choices(
    config: CacheConfig, start: int, end: int, few: int
) -> Iterator[tuple[Sequence[int], int]]:
    """Sets of opportunistic depths, the most wanted first; each about half the one before.

    And how many of a set memory need not be free for.  None of one that is denser than
    `config.opportunistic`: a turn of a few blocks is no new prefix.
    """
    step = config.opportunistic
    if step and config.dense:
        step = config.dense
        depths = grid_depths(step, start, end)
        if len(depths) <= _DENSE_MOST:
            yield depths, 0
    while step and step < end:
        yield opportunistic_depths(step, start, end), few if step >= config.opportunistic else 0
        step *= 2


def plan_stops(
    config: CacheConfig,
    match: Match,
    *,
    start: int,
    prompt_len: int,
    boundaries: Sequence[int],
    spare: Callable[[int], bool],
    few: int = 0,
) -> tuple[Stop, ...]:
    """Sorted depths in (start, prompt_len] at which a state is wanted, one kind each.

    The prompt's end is always among them. Where two reasons meet, the
    stronger names the kind: prompt end, junction, boundary, interval, opportunistic. A junction
    needs a second way on: a prompt that just goes on where a known one ended shares nothing that
    its own end will not cover; one that is known to its end may come a third time. `spare(n)`
    says whether memory for n states is as good as free; if not, every other opportunistic one is
    given up until it is, or until they are `few`.  Where they cost no cut (`config.dense`), they
    first stand on every `dense` tokens, so that the second prompt with any shared prefix resumes
    within that distance of its end.
    """
    end = prompt_len
    if end <= start:
        return ()
    kinds: dict[int, Kind] = {}
    if config.interval:
        kinds.update(dict.fromkeys(grid_depths(config.interval, start, end), Kind.INTERVAL))
    kinds.update(dict.fromkeys((b for b in boundaries if start < b < end), Kind.BOUNDARY))
    proven = match.diverged or match.matched_len >= end - end % config.block_size
    if proven and match.junction is not None and start < match.junction < end:
        kinds[match.junction] = Kind.JUNCTION
    kinds[end] = Kind.PROMPT_END
    share = _DENSE_SHARE if config.dense else 1
    for depths, at_most in _opportunistic_choices(config, start, end, few):
        extra = [depth for depth in depths if depth not in kinds]
        if len(extra) <= at_most or spare(share * (len(kinds) + len(extra))):
            kinds.update(dict.fromkeys(extra, Kind.OPPORTUNISTIC))
            break
    return tuple(Stop(depth, kinds[depth]) for depth in sorted(kinds))
