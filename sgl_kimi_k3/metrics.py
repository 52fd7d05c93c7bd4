"""Our series on SGLang's `/metrics`, prefix `kimi_k3:`, base units, SGLang's labels.

The policy keeps plain running totals; `publish` turns their growth since the last call into counter
increments, so retries and chunks cannot inflate anything.  Every series exists from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radix import Cause, Kind, Loss
from sgl_kimi_k3.ages import BOUNDS_S
from sgl_kimi_k3.limits import limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sgl_kimi_k3.cache_adapter import KimiK3Cache

PREFIX = "kimi_k3:"
Series = tuple[str, tuple[str, ...]]  # name without prefix and `_total`, label values

# name -> (help, label names)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Requests, counted once at first scheduling.", ()),
    "input_tokens": ("Prompt tokens of requests, counted once at first scheduling.", ()),
    "matched_tokens": ("Prompt tokens that were known, with or without bytes.", ()),
    "resumed_tokens": ("Prompt tokens that were not computed again.", ()),
    "lost_tokens": ("Prompt tokens that were computed, by reason.", ("reason",)),
    "hit_tokens": ("Resumed tokens by the kind of checkpoint resumed from.", ("kind",)),
    "checkpoints_taken": ("States kept in the tree, by kind.", ("kind",)),
    "checkpoints_refused": ("States not kept, by kind and cause.", ("kind", "cause")),
    "checkpoints_evicted": ("States dropped, by kind and what needed room.", ("kind", "cause")),
    "evicted_kv_tokens": ("Tokens of KV dropped, by what needed room.", ("cause",)),
    "retracted_requests": ("Running requests that had to give their memory back.", ()),
    "held_requests": ("Requests held back at least once, for states that others come for.", ()),
    "let_in_requests": ("Requests let in because as many as may had passed them.", ()),
    "refused_allocations": ("Allocations that the arena could not meet as it was.", ()),
    "moves": ("States and KV blocks moved to close holes in the arena.", ()),
    "moved_bytes": ("Bytes moved to close holes in the arena.", ()),
}
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "arena_bytes": ("Bytes of the arena by part; the parts add up to the arena.", ("part",)),
    "peak_bytes": ("Most bytes an end of the arena ever spanned, holes included.", ("side",)),
    "live_states": ("States handed out: running requests and checkpoints.", ()),
    "live_blocks": ("KV blocks handed out.", ()),
    "cached_states": ("States in the tree.", ()),
    "cached_blocks": ("KV blocks in the tree.", ()),
    "protected_states": ("States in the tree that running requests protect.", ()),
    "protected_blocks": ("KV blocks in the tree that running requests protect.", ()),
    "available_states": ("States that fit if everything evictable were evicted.", ()),
    "available_blocks": ("KV blocks that fit if everything evictable were evicted.", ()),
    "held_now": ("Waiting requests that were held back in the last pass.", ()),
    "most_overtaken": ("Most admissions of later requests past one that waited.", ()),
    "ghost_tokens": ("Tokens remembered without bytes.", ()),
    "pins": ("Paths that running requests protect.", ()),
    "limits": ("Limits as asked for at launch (0: not) and in force.", ("limit", "value")),
    "policy": ("The eviction policy's own numbers.", ("number",)),
}
HISTOGRAMS: dict[str, str] = {
    "hit_age_seconds": "Time since a state was kept or last used, when a request resumed from it.",
    "eviction_age_seconds": "Time since a state was kept or last used, when it was evicted.",
}
METRIC_NAMES: frozenset[str] = frozenset(
    [f"{PREFIX}{name}_total" for name in COUNTERS]
    + [f"{PREFIX}{name}" for name in GAUGES]
    + [f"{PREFIX}{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")]
)


class Metrics:
    """Publishes one cache's totals through prometheus_client."""

    def __init__(self, cache: KimiK3Cache, labels: Mapping[str, str]) -> None:
        # prometheus_client must be imported after SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415

        names, self._base = tuple(labels), tuple(labels.values())
        self._cache = cache
        self._totals: dict[Series, float] = {}
        self._levels: dict[Series, float] = {}
        counters = {
            name: Counter(PREFIX + name, text, (*names, *own))
            for name, (text, own) in COUNTERS.items()
        }
        gauges = {
            name: Gauge(PREFIX + name, text, (*names, *own), multiprocess_mode="mostrecent")
            for name, (text, own) in GAUGES.items()
        }
        ages = {
            name: self._child(Histogram(PREFIX + name, text, names, buckets=BOUNDS_S), ())
            for name, text in HISTOGRAMS.items()
        }
        cache.observer.pool.hit.exported = ages["hit_age_seconds"].observe
        cache.observer.pool.eviction.exported = ages["eviction_age_seconds"].observe
        self._inc = {s: self._child(counters[s[0]], s[1]).inc for s, _ in totals(cache)}
        self._set = {s: self._child(gauges[s[0]], s[1]).set for s, _ in levels(cache)}
        self.publish()

    @classmethod
    def of(cls, cache: KimiK3Cache) -> Metrics:
        """With SGLang's labels for radix caches."""
        return cls(cache, cache.metrics_collector.labels)

    def publish(self) -> None:
        """Bring the exported series up to date."""
        for series, total in totals(self._cache):
            grown = total - self._totals.get(series, 0)
            assert grown >= 0, f"{series} fell by {-grown}"
            if grown:
                self._inc[series](grown)
                self._totals[series] = total
        for series, level in levels(self._cache):
            if self._levels.get(series) != level:
                self._set[series](level)
                self._levels[series] = level

    def _child(self, metric: Any, own: tuple[str, ...]) -> Any:
        values = (*self._base, *own)
        return metric.labels(*values) if values else metric


def totals(cache: KimiK3Cache) -> Iterator[tuple[Series, float]]:
    """Every counter series with its running total."""
    tree, pool = cache.cache.report(), cache.arena.pool.report()
    yield ("requests", ()), tree.requests
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
    yield ("retracted_requests", ()), cache.observer.retracted
    yield ("held_requests", ()), cache.gate.turnstile.held_requests
    yield ("let_in_requests", ()), cache.gate.turnstile.let_in
    yield ("refused_allocations", ()), pool.counters.refusals
    yield ("moves", ()), pool.counters.moves
    yield ("moved_bytes", ()), pool.counters.moved_bytes


def levels(cache: KimiK3Cache) -> Iterator[tuple[Series, float]]:
    """Every gauge series with its value now."""
    tree, pool = cache.cache.report(), cache.arena.pool.report()
    parts = {
        "states": pool.states.live_bytes + pool.states.retired_bytes,
        "state_holes": pool.states.hole_bytes,
        "kv": pool.blocks.live_bytes + pool.blocks.retired_bytes,
        "kv_holes": pool.blocks.hole_bytes,
        "gap": pool.gap_bytes,
        "sink": pool.sink_bytes + pool.slack_bytes,
    }
    for part, size in parts.items():
        yield ("arena_bytes", (part,)), size
    yield ("peak_bytes", ("states",)), pool.states.peak_bytes
    yield ("peak_bytes", ("kv",)), pool.blocks.peak_bytes
    yield ("live_states", ()), pool.states.live
    yield ("live_blocks", ()), pool.blocks.live
    yield ("cached_states", ()), tree.states
    yield ("cached_blocks", ()), tree.blocks
    yield ("protected_states", ()), tree.protected_states
    yield ("protected_blocks", ()), tree.protected_blocks
    yield ("available_states", ()), cache.room.reclaimable_states()
    yield ("available_blocks", ()), cache.room.reclaimable_blocks()
    yield ("held_now", ()), len(cache.gate.held)
    yield ("most_overtaken", ()), cache.gate.turnstile.most_overtaken
    yield ("ghost_tokens", ()), tree.ghost_tokens
    yield ("pins", ()), tree.pins
    for limit, values in limits(cache).items():
        for value, number in values.items():
            yield ("limits", (limit, value)), number or 0
    for name, number in tree.policy.items():
        yield ("policy", (name,)), number
