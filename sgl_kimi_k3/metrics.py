"""Our series on SGLang's `/metrics`, prefix `kimi_k3:`, base units, SGLang's labels.

The policy keeps plain running totals; `publish` turns their growth since the last call into counter
increments, so retries and chunks cannot inflate anything.  Every series exists from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radix import Cause, Kind, Loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sgl_kimi_k3.cache_adapter import KimiK3Cache

PREFIX = "kimi_k3:"
Series = tuple[str, tuple[str, ...]]  # name without prefix and `_total`, label values

# name -> (help, label names)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "input_tokens": ("Prompt tokens of requests, counted once at first scheduling.", ()),
    "matched_tokens": ("Prompt tokens that were known, with or without bytes.", ()),
    "resumed_tokens": ("Prompt tokens that were not computed again.", ()),
    "lost_tokens": ("Prompt tokens that were computed, by reason.", ("reason",)),
    "hit_tokens": ("Resumed tokens by the kind of checkpoint resumed from.", ("kind",)),
    "checkpoints_taken": ("States kept in the tree, by kind.", ("kind",)),
    "checkpoints_refused": ("States not kept, by kind and cause.", ("kind", "cause")),
    "checkpoints_evicted": ("States evicted, by kind and cause.", ("kind", "cause")),
    "evicted_kv_tokens": ("Tokens of KV evicted, by cause.", ("cause",)),
    "retracted_requests": ("Running requests that had to give their memory back.", ()),
    "moved_bytes": ("Bytes moved to close holes in the arena.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "arena_bytes": ("Bytes of the arena by part; the parts add up to the arena.", ("part",)),
    "live_states": ("States handed out: running requests and checkpoints.", ()),
    "live_blocks": ("KV blocks handed out.", ()),
    "cached_states": ("States in the tree.", ()),
    "cached_blocks": ("KV blocks in the tree.", ()),
    "ghost_tokens": ("Tokens remembered without bytes.", ()),
    "pins": ("Paths that running requests protect.", ()),
}
METRIC_NAMES: frozenset[str] = frozenset(
    [f"{PREFIX}{name}_total" for name in COUNTERS] + [f"{PREFIX}{name}" for name in GAUGES]
)


class Metrics:
    """Publishes one cache's totals through prometheus_client."""

    def __init__(self, cache: KimiK3Cache, labels: Mapping[str, str]) -> None:
        # prometheus_client must be imported after SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge  # noqa: PLC0415

        names = tuple(labels)
        self._cache = cache
        self._base = tuple(labels.values())
        self._published: dict[Series, float] = {}
        self._counters: dict[str, Any] = {
            name: Counter(PREFIX + name, text, (*names, *own))
            for name, (text, own) in COUNTERS.items()
        }
        self._gauges: dict[str, Any] = {
            name: Gauge(PREFIX + name, text, (*names, *own), multiprocess_mode="mostrecent")
            for name, (text, own) in GAUGES.items()
        }
        self.publish()

    @classmethod
    def of(cls, cache: KimiK3Cache) -> Metrics:
        """With SGLang's labels for radix caches."""
        return cls(cache, cache.metrics_collector.labels)

    def publish(self) -> None:
        """Bring the exported series up to date."""
        for (name, own), total in totals(self._cache):
            grown = total - self._published.get((name, own), 0)
            assert grown >= 0, f"{name}{own} fell by {-grown}"
            # `inc(0)` creates the series.
            if grown or (name, own) not in self._published:
                self._child(self._counters[name], own).inc(grown)
                self._published[name, own] = total
        for (name, own), value in levels(self._cache):
            self._child(self._gauges[name], own).set(value)

    def _child(self, metric: Any, own: tuple[str, ...]) -> Any:
        values = (*self._base, *own)
        return metric.labels(*values) if values else metric


def totals(cache: KimiK3Cache) -> Iterator[tuple[Series, float]]:
    """Every counter series with its running total."""
    tree, pool = cache.cache.report(), cache.arena.pool.report()
    yield ("input_tokens", ()), tree.input_tokens
    yield ("matched_tokens", ()), tree.matched_tokens
    yield ("resumed_tokens", ()), tree.resumed_tokens
    for loss in Loss:
        yield ("lost_tokens", (loss.value,)), tree.lost_tokens[loss]
    for kind in Kind:
        yield ("hit_tokens", (kind.value,)), tree.hit_tokens[kind]
        yield ("checkpoints_taken", (kind.value,)), tree.taken[kind]
        yield ("checkpoints_refused", (kind.value, "present")), tree.present[kind]
        yield ("checkpoints_refused", (kind.value, "no_memory")), tree.skipped[kind]
        for cause in Cause:
            yield ("checkpoints_evicted", (kind.value, cause.value)), tree.evictions[kind, cause]
    for cause in Cause:
        yield ("evicted_kv_tokens", (cause.value,)), tree.evicted_tokens_for[cause]
    yield ("retracted_requests", ()), cache.retracted
    yield ("moved_bytes", ()), pool.counters.moved_bytes


def levels(cache: KimiK3Cache) -> Iterator[tuple[Series, float]]:
    """Every gauge series with its value now."""
    tree, pool = cache.cache.report(), cache.arena.pool.report()
    parts = {
        "states": pool.states.live_bytes + pool.states.retired_bytes,
        "kv": pool.blocks.live_bytes + pool.blocks.retired_bytes,
        "holes": pool.states.hole_bytes + pool.blocks.hole_bytes,
        "gap": pool.gap_bytes,
        "sink": pool.sink_bytes + pool.slack_bytes,
    }
    for part, size in parts.items():
        yield ("arena_bytes", (part,)), size
    yield ("live_states", ()), pool.states.live
    yield ("live_blocks", ()), pool.blocks.live
    yield ("cached_states", ()), tree.states
    yield ("cached_blocks", ()), tree.blocks
    yield ("ghost_tokens", ()), tree.ghost_tokens
    yield ("pins", ()), tree.pins
