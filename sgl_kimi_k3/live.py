"""The live report: one scheduler's cache and memory as JSON, under `kimi_k3` in `/server_info`.

The schema, field by field, is in docs/operating.md.  Works without `--enable-metrics`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_parallel

from radix import Cause, Kind
from sgl_kimi_k3.limits import limits
from sgl_kimi_k3.scheduler import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.report import SideReport
    from radix import Report
    from sgl_kimi_k3.cache_adapter import KimiK3Cache

SCHEMA = 1


def internal_state(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `Scheduler.get_internal_state`: our report beside SGLang's own."""
    answer = original(scheduler, *args, **kwargs)
    if is_ours(scheduler.tree_cache):
        answer.internal_state["kimi_k3"] = live_report(scheduler.tree_cache)
    return answer


def live_report(cache: KimiK3Cache) -> dict[str, Any]:
    """Everything an operator can see of one scheduler; plain values only."""
    parallel = get_parallel()
    tree, pool = cache.cache.report(), cache.observer.pool
    explanations = cache.observer.explanations
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "rank": {"tp": parallel.tp_rank, "dp": parallel.attn_dp_rank, "pp": parallel.pp_rank},
        "options": cache.options.as_dict(),
        "arena": _arena(cache, tree),
        "requests_counted": tree.requests,
        "tokens": {
            "input": tree.input_tokens,
            "matched": tree.matched_tokens,
            "resumed": tree.resumed_tokens,
            "lost": {reason.value: tokens for reason, tokens in tree.lost_tokens.items()},
        },
        "hits": {kind.value: tokens for kind, tokens in tree.hit_tokens.items()},
        "checkpoints": _checkpoints(tree),
        "evicted_kv_tokens": {c.value: n for c, n in tree.evicted_tokens_for.items()},
        "ghost_tokens": tree.ghost_tokens,
        "pins": tree.pins,
        "retracted_requests": cache.observer.retracted,
        "queue": {
            "held": len(cache.gate.held),
            "held_requests": cache.gate.turnstile.held_requests,
            "let_in_requests": cache.gate.turnstile.let_in,
            "most_overtaken": cache.gate.turnstile.most_overtaken,
        },
        "ages": {"hit": pool.hit.as_dict(), "eviction": pool.eviction.as_dict()},
        "limits": limits(cache),
        "policy": dict(tree.policy),
        "explain": explanations is not None,
        "requests": [] if explanations is None else explanations.rows(),
    }


def _arena(cache: KimiK3Cache, tree: Report) -> dict[str, Any]:
    pool, geometry = cache.arena.pool.report(), cache.arena.geometry
    return {
        "total_bytes": pool.total_bytes,
        "states": _side(
            pool.states, tree.states, tree.protected_states, cache.room.reclaimable_states()
        ),
        "kv": _side(
            pool.blocks, tree.blocks, tree.protected_blocks, cache.room.reclaimable_blocks()
        ),
        "gap_bytes": pool.gap_bytes,
        "sink_bytes": pool.sink_bytes,
        "slack_bytes": pool.slack_bytes,
        "state_bytes": geometry.state_bytes,
        "block_bytes": geometry.block_bytes,
        "block_size": geometry.block_size,
        "max_states": geometry.max_states,
        "max_blocks": geometry.max_blocks,
        "moves": pool.counters.moves,
        "moved_bytes": pool.counters.moved_bytes,
        "grants": pool.counters.grants,
        "refusals": pool.counters.refusals,
    }


def _side(side: SideReport, cached: int, protected: int, available: int) -> dict[str, int]:
    return {
        "live": side.live,
        "cached": cached,
        "protected": protected,
        "available": available,
        "fundable": side.fundable,
        "peak": side.peak,
        "live_bytes": side.live_bytes,
        "retired_bytes": side.retired_bytes,
        "hole_bytes": side.hole_bytes,
        "peak_bytes": side.peak_bytes,
    }


def _checkpoints(tree: Report) -> dict[str, Any]:
    evicted = {
        cause.value: {kind.value: tree.evictions[kind, cause] for kind in Kind} for cause in Cause
    }
    return {
        "held": {kind.value: count for kind, count in tree.held.items()},
        "taken": {kind.value: count for kind, count in tree.taken.items()},
        "refused": {
            "present": {kind.value: count for kind, count in tree.present.items()},
            "no_memory": {kind.value: count for kind, count in tree.skipped.items()},
        },
        "evicted": evicted,
    }
