"""What watches one scheduler's cache and decides nothing: counts, ages, explanations, the trace."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sgl_kimi_k3.ages import AgingPool
from sgl_kimi_k3.explain import Explanations
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from radix import PrefixCache
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.capture import Capture
    from sgl_kimi_k3.config import Options
    from sgl_kimi_k3.metrics import Metrics
    from sgl_kimi_k3.trace import TraceWriter

PUBLISH_EVERY_S = 0.2  # a scraper asks every few seconds; a step takes a few milliseconds


class Observer:
    """Told of what happens to requests.

    Args:
        arena: the memory; the tree must use `pool`, which is the arena with ages.
        options: ours.
        block_size: tokens of a block.
        trace: where served requests are recorded, or None.
    """

    def __init__(
        self, arena: Arena, options: Options, *, block_size: int, trace: TraceWriter | None
    ) -> None:
        self._arena = arena
        self.pool = AgingPool(arena)
        self.explanations = Explanations(block_size) if options.explain else None
        self._trace = trace
        self.retracted = 0  # requests
        self.metrics: Metrics | None = None
        self._publish_at = 0.0
        self._changed = False
        self._idle_mark: tuple[int, ...] = ()

    def admitted(self, tree: PrefixCache, req: Req) -> None:
        """The request was admitted; only the first time counts."""
        match, first = req.lock.node, not req.retracted_stain
        if match.slot is not None:
            self.pool.resumed(match.slot, counted=first)
        if first:
            if self.explanations is not None:
                self.explanations.add(req.rid, match)
            tree.record(match)
            if self._trace is not None and not req.skip_radix_cache_insert:
                tokens = tokens_of(req.full_untruncated_fill_ids)
                self._trace.request(req.rid, tokens, namespace_of(req))
        self._changed = True

    def committed(self, offers: Iterable[Capture], refused: Sequence[int]) -> None:
        """The tree was offered these states, and took all but the refused slots."""
        self.pool.kept(offer for offer in offers if offer.slot not in refused)
        self._changed = True

    def released(self, req: Req) -> None:
        """The request's row is gone."""
        if self._trace is not None and req.finished():
            self._trace.finished(req.rid, len(req.output_ids))

    # -- the exported series --

    def stepped(self) -> None:
        """A scheduling step: publish what changed, at most every PUBLISH_EVERY_S seconds."""
        if self._changed and self.metrics is not None and time.monotonic() >= self._publish_at:
            self._publish()

    def idle(self) -> None:
        """Nothing runs: publish what changed.

        SGLang frees a request's last blocks after the tree has had its say, and a flush frees all.
        """
        if self.metrics is None:
            return
        pool = self._arena.pool
        counters = pool.report().counters
        mark = (counters.grants, counters.blocks_freed, pool.live_states, pool.live_blocks)
        if self._changed or mark != self._idle_mark:
            self._idle_mark = mark
            self._publish()

    def _publish(self) -> None:
        assert self.metrics is not None
        self.metrics.publish()
        self._changed = False
        self._publish_at = time.monotonic() + PUBLISH_EVERY_S
