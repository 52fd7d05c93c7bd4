"""From a request to the tree: what a commit publishes, and what stays the request's.

What a request owns, as regions of its row (positions are tokens):

    [0, cache_protected_len)          the tree's, pinned by `req.lock`; ends at a block boundary
    [cache_protected_len, allocated)  the request's own until a commit publishes it
    mamba_pool_idx                    the request's live state, after the last computed token

While it runs, only copies of its live state are published, with a copy of its last block where the
state stands inside one: it goes on writing both.  At its end both themselves change owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.storage import upload
from sgl_kimi_k3.capture import Capture
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req

    from radix import Commit, IdArray, Kind, Match, Pin, PrefixCache
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.capture import Captures
    from sgl_kimi_k3.observer import Observer
    from sgl_kimi_k3.pool_adapter import ArenaAllocator
    from sgl_kimi_k3.rows import RequestRows


@dataclass(slots=True)
class Lock:
    """SGLang's `req.lock`: the pin that protects a path, opaque to SGLang."""

    node: Match | None
    pin: Pin


class Handover:
    """Publishes what requests computed.

    Args:
        cache: the tree.
        arena: where state ids are read.
        rows: the requests' blocks.
        allocator: takes back the blocks that the tree had already.
        captures: the states taken on the way.
        observer: told of what was published.
    """

    def __init__(
        self,
        cache: PrefixCache,
        arena: Arena,
        *,
        rows: RequestRows,
        allocator: ArenaAllocator,
        captures: Captures,
        observer: Observer,
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._rows = rows
        self._allocator = allocator
        self._captures = captures
        self._observer = observer
        self._size = allocator.page_size

    def publish(self, req: Req, up_to: int) -> None:
        """Hand over the states that were left up to `up_to`, if any."""
        captures = self._captures.collect(req, up_to)
        if captures:
            req.lock = Lock(None, self._commit(req, up_to, captures, live=None).pin)

    def finish(self, req: Req, up_to: int, kind: Kind) -> None:
        """Publish what is held and the live state, if its depth can be named; free the rest.

        The request's row still holds the blocks from `cache_protected_len` on: SGLang frees them.
        """
        held = self._captures.collect(req)
        # The live state stands for a prompt end that is also the turn's end.
        self._captures.free(one for one in held if one.depth >= up_to)
        offers = [one for one in held if one.depth < up_to]
        live = None
        if up_to == req.kv.kv_committed_len and up_to > 0:
            live = self._live(req, up_to, kind)
            offers.append(live)
        commit = self._commit(req, up_to, offers, live=live, finished=True)
        if live is not None and live.slot not in commit.refused:
            req.kv.mamba_pool_idx = None
            if live.tail is not None and live.tail not in commit.spare:
                req.kv.cache_protected_len += self._size  # the last block is the tree's too
        req.lock = None
        if req.kv.holds_mamba:
            self._rows.free_mamba_cache(req)

    def _live(self, req: Req, depth: int, kind: Kind) -> Capture:
        """The request's own live state and, inside a block, its own last block."""
        slot = self._arena.slots.read_one(req.kv.mamba_pool_idx)
        tail = self._rows.block_at(req.kv.req_pool_idx, depth - 1) if depth % self._size else None
        return Capture(depth, slot, kind, tail)

    def _commit(
        self,
        req: Req,
        up_to: int,
        offers: list[Capture],
        *,
        live: Capture | None,
        finished: bool = False,
    ) -> Commit:
        """Hand [cache_protected_len, up_to) to the tree; adopt its blocks where it had some.

        What the tree does not take of the offers is freed, except what is `live`.
        """
        start, size = req.kv.cache_protected_len, self._size
        row = req.kv.req_pool_idx
        mine = self._rows.blocks(row, start // size, up_to // size)
        commit = self._cache.commit(
            req.lock.pin,
            tokens_of(req.full_untruncated_fill_ids, up_to),
            namespace_of(req),
            mine,
            [(one.depth, one.slot, one.kind, one.tail) for one in offers],
            finished=finished,
            refused=self._captures.collect_refused(req),
        )
        self._observer.committed(offers, commit.refused)
        for first, last in commit.duplicates:
            same = slice((first - start) // size, (last - start) // size)
            self._allocator.free_blocks(mine[same])
            self._rows.put(row, first // size, commit.blocks[same])
            self._rows.write((row, slice(first, last)), self.token_ids(commit.blocks[same]))
        req.kv.cache_protected_len = commit.kept_len - commit.kept_len % size
        own = () if live is None else (live.slot,)
        last = () if live is None else (live.tail,)
        self._captures.give_back(
            [slot for slot in commit.refused if slot not in own],
            [tail for tail in commit.spare if tail not in last],
        )
        return commit

    def token_ids(self, blocks: IdArray) -> torch.Tensor:
        """Ids of all tokens in these blocks: int64 on the device."""
        offsets = np.arange(self._size, dtype=np.int64)
        return upload((blocks[:, None] * self._size + offsets).ravel(), self._arena.device)
