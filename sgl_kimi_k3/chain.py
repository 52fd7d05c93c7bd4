"""A chain of drafts: which of a tree's to verify, and where it must end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req


def chain(
    tokens: NDArray[Any], mask: NDArray[Any], *, longest: int, last: Collection[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The most recent continuation of the longest context, out of a tree of drafts.

    Args:
        tokens: [W], node 0 the last known token, others behind their parents.
        mask: [W, W] bool, whether j is i or an ancestor of i.
        longest: tokens, node 0 among them, at which the chain ends at the latest.
        last: tokens behind which it ends.

    Returns:
        Both in the same form: the chain in front, then nodes without ancestors, which are read but
        can never be accepted.
    """
    window = len(tokens)
    above = np.where(np.tri(window, k=-1, dtype=bool) & mask, np.arange(window), -1).max(1)
    path = [0]
    while len(path) < longest and (len(path) == 1 or int(tokens[path[-1]]) not in last):
        children = np.flatnonzero(above == path[-1])
        if not children.size:
            break
        path.append(int(children[0]))
    length = len(path)
    links = np.eye(window, dtype=bool)
    links[:length, :length] = np.tri(length, dtype=bool)
    drafts = np.full_like(tokens, tokens[0])
    drafts[:length] = tokens[path]
    return drafts, links


def tokens_left(req: Req) -> int:
    """Tokens until the request has as many as it asked for."""
    return int(req.sampling_params.max_new_tokens) - len(req.output_ids)


def ends(req: Req) -> Collection[int]:
    """Tokens at which the request ends, as `Req._check_token_based_finish` knows them."""
    if req.sampling_params.ignore_eos:
        return ()
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        found.add(req.tokenizer.eos_token_id)
        found |= set(req.tokenizer.additional_stop_token_ids or ())
    return found
