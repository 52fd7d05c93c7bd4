"""SGLang's prefix cache interface over `radix.PrefixCache`: SGLang's words stop here.

What a request owns, as regions of its row (positions are tokens):

    [0, cache_protected_len)          the tree's, pinned by `req.lock`
    [cache_protected_len, allocated)  the request's own until a commit publishes it
    mamba_pool_idx                    the request's live state, after the last computed token

States are captured by cutting prefill chunks at the stops (`scheduler.StopAwareAdder`): when the
forward of a chunk that ends on a stop is done, the live state *is* the state at the stop.  The copy
is enqueued right behind that forward, so it is exact although the next step may already be launched
when the result is processed.  At the end the live state itself is given to the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)

from radix import CacheConfig, Costs, Kind, PrefixCache
from radix.tokens import common_len
from sgl_kimi_k3.arena import NO_IDS
from sgl_kimi_k3.metrics import Metrics
from sgl_kimi_k3.pool_adapter import to_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        DecLockRefParams,
        EvictParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from radix import Commit, IdArray, Match, Pin, TokenArray
    from sgl_kimi_k3.boundaries import BoundaryRule
    from sgl_kimi_k3.config import Options
    from sgl_kimi_k3.pool_adapter import ArenaAllocator
    from sgl_kimi_k3.trace import TraceWriter

# Opportunistic states leave room for new work: these states and one part in so many of the arena.
RESERVED_STATES = 2
RESERVED_SHARE = 8

Namespace = tuple[str | None, str | None]


@dataclass(slots=True)
class Lock:
    """SGLang's `req.lock`: the pin that protects a path, opaque to SGLang."""

    node: Match | None
    pin: Pin


@dataclass(frozen=True, slots=True)
class Capture:
    """A state slot that the launched chunk fills; the request's until a commit publishes it."""

    depth: int
    slot: int
    kind: Kind


class KimiK3Cache(BasePrefixCache):
    """The tree SGLang's scheduler drives under `--radix-cache-backend kimi_k3`."""

    def __init__(
        self,
        params: CacheInitParams,
        options: Options,
        *,
        rule: BoundaryRule | None,
        trace: TraceWriter | None = None,
    ) -> None:
        self.disable = params.disable
        self.page_size = params.page_size
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator: ArenaAllocator = params.token_to_kv_pool_allocator
        self.sliding_window_size = None
        self.root_node = None
        self.arena = self.token_to_kv_pool_allocator.arena
        geometry = self.arena.geometry
        self.options = options
        self.rule = rule
        self.trace = trace
        self.cache = PrefixCache(
            self.arena,
            CacheConfig(
                block_size=self.page_size,
                grid=options.grid,
                interval=options.interval,
                opportunistic=options.opportunistic,
                ghost_tokens=options.ghost_tokens,
                reserve_states=RESERVED_STATES,
                reserve_blocks=geometry.max_blocks // RESERVED_SHARE,
                costs=Costs(
                    state_bytes=geometry.state_bytes,
                    token_bytes=geometry.block_bytes // geometry.block_size,
                ),
            ),
        )
        self.token_to_kv_pool_allocator.tree = self
        self.refused_no_memory = 0  # checkpoints for which no state could be had
        self.retracted = 0  # requests
        self.metrics: Metrics | None = None
        if params.enable_metrics:
            self.init_metrics_collector()

    # -- what SGLang asks about us --

    def supports_mamba(self) -> bool:
        """States are cached."""
        return True

    def supports_prefix_sharing(self) -> bool:
        """False under `--disable-radix-cache`."""
        return not self.disable

    def init_metrics_collector(self) -> None:
        """SGLang's radix collector, and our own series beside it."""
        super().init_metrics_collector()
        self.metrics = Metrics.of(self)

    # -- lookup --

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest prefix that can be resumed; for admission also the request's own state slot.

        The lookup itself changes nothing.  With `cow_mamba` a live slot is taken for the copy the
        forward will make; when none can be had the answer is "no prefix", and admission, which
        counts states, refuses the request for now.
        """
        key = params.key
        if self.disable or len(key) == 0:
            return _result(0, None)
        match = self.cache.match(_tokens(key.token_ids), _namespace(key), limit=len(key))
        if match.resume_len == 0:
            return _result(0, match)
        if params.cow_mamba and not self._take_live_slot(params.req, match):
            return _result(0, None)
        return _result(match.resume_len, match)

    def _take_live_slot(self, req: Req, match: Match) -> bool:
        if not req.kv.holds_mamba:
            pin = self.cache.pin(match)
            grant = self._acquire(1, 0)
            self.cache.unpin(pin)
            if grant is None:
                return False
            req.kv.mamba_pool_idx = self._tensor(grant.states)[0]
        req.kv.mamba_cow_src_index = self._tensor(np.array([match.slot], dtype=np.int64))
        req.kv.mamba_needs_clear = False
        return True

    def path_device_indices(self, node: Match | None) -> torch.Tensor:
        """Token ids of the matched prefix: int64 [resume_len]."""
        if node is None or node.resume_len == 0:
            return torch.empty(0, dtype=torch.int64, device=self.arena.device)
        return self._token_ids(self.cache.path_blocks(node))

    # -- locks --

    def lock(self, node: Match | None) -> Lock | None:
        """Protect the path to `node` and the state at its end."""
        return None if node is None else Lock(node, self.cache.pin(node))

    def unlock(self, lock: Lock | None) -> None:
        """Give the protection back."""
        if lock is not None:
            self.cache.unpin(lock.pin)

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Not used: `lock` keeps its own receipt."""
        raise AssertionError(f"inc_lock_ref on {type(self).__name__}: use lock({node!r})")

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Not used: `unlock` takes the receipt."""
        raise AssertionError(
            f"dec_lock_ref on {type(self).__name__}: use unlock({node!r}, {params})"
        )

    # -- one request's life --

    def plan(self, req: Req) -> None:
        """Plan the stops of a matched, not yet admitted request.  Nothing is taken or counted."""
        if self.disable:
            return
        tokens = _tokens(req.full_untruncated_fill_ids)
        if req.last_node is None:
            req.last_node = self.cache.match(tokens, _namespace(req), limit=0)
        boundaries = () if self.rule is None else self.rule.boundaries(tokens)
        stops = self.cache.stops(
            req.last_node, start=req.prefix_len, prompt_len=len(tokens), boundaries=boundaries
        )
        req.kimi_k3_stops = {stop.depth: stop.kind for stop in stops}

    def next_stop(self, req: Req, *, only_firm: bool) -> int | None:
        """First depth past `req.prefix_len` at which a chunk of `req` should end.

        `only_firm` leaves out the opportunistic ones.
        """
        stops: dict[int, Kind] = getattr(req, "kimi_k3_stops", {})
        wanted = (
            depth
            for depth, kind in stops.items()
            if depth > req.prefix_len and not (only_firm and kind is Kind.OPPORTUNISTIC)
        )
        return min(wanted, default=None)

    def worth_waiting(self, leader: Req, req: Req) -> bool:
        """Whether `leader`, whose prefill is unfinished, will leave a state that `req` can resume.

        True if one of its coming stops lies on the prefix both share and saves `req` a grid step.
        """
        stops = [depth for depth in leader.kimi_k3_stops if depth > leader.prefix_len]
        if self.disable or not stops or _namespace(leader) != _namespace(req):
            return False
        ours, theirs = req.full_untruncated_fill_ids, leader.full_untruncated_fill_ids
        limit = min(len(ours) - 1, len(theirs), max(stops))
        shared = common_len(_tokens(ours[:limit]), _tokens(theirs[:limit]))
        gain = max((depth for depth in stops if depth <= shared), default=0) - req.prefix_len
        return gain >= self.options.grid

    def admitted(self, req: Req) -> None:
        """The request was admitted: mark what it consumes and, the first time, count it."""
        if self.disable:
            return
        self.cache.touch(req.lock.pin)
        if not req.retracted_stain:
            self.cache.record(req.lock.node)
            if self.trace is not None:
                self.trace.request(req.rid, _tokens(req.full_untruncated_fill_ids))
        self._publish()

    def checkpoint(self, req: Req, *, up_to: int, **_: Any) -> None:
        """Publish what the request computed, if its live state stands on a stop or it finished."""
        if self.disable:
            if req.finished():
                self.req_to_token_pool.free_mamba_cache(req)
            return
        if req.finished():
            self._finish(req, up_to, Kind.TURN_END)
            return
        capture = _take(req, "kimi_k3_capture")
        if capture is None:
            return
        assert capture.depth == up_to, (req.rid, capture, up_to)
        commit = self._commit(req, up_to, [(up_to, capture.slot, capture.kind)], finished=False)
        self._free_states(commit.refused)
        req.lock = Lock(None, commit.pin)
        self._publish()

    def capture(self, req: Req) -> tuple[int, int] | None:
        """If the chunk to be launched ends on a stop: (live state, slot to copy it to afterwards).

        Best effort: without memory the chunk runs all the same and nothing is kept.  An
        opportunistic state never evicts anything.
        """
        kind: Kind | None = getattr(req, "kimi_k3_stops", {}).get(req.extend_end)
        if self.disable or kind is None:
            return None
        optional = kind is Kind.OPPORTUNISTIC
        grant = self.arena.alloc(1, 0) if optional else self._acquire(1, 0)
        if grant is None:
            self.refused_no_memory += 1
            return None
        req.kimi_k3_capture = Capture(req.extend_end, int(grant.states[0]), kind)
        return int(req.kv.mamba_pool_idx), req.kimi_k3_capture.slot

    def retract(self, req: Req) -> None:
        """Before SGLang takes a running request's memory: leave its latest state in the tree.

        The state and the KV behind it become evictable like any other, so that memory needed now
        still comes from whatever is least valuable.
        """
        if req.finished():
            return
        self.retracted += 1
        if self.disable or not (req.kv.holds_kv and req.kv.holds_mamba):
            return
        req.refresh_fill_ids()
        self._finish(req, req.kv.kv_committed_len, Kind.RETRACT)

    def _finish(self, req: Req, up_to: int, kind: Kind) -> None:
        """Donate the live state at `up_to`, or free it when it cannot be named by a depth."""
        self._drop_capture(req)
        offers = []
        if up_to == req.kv.kv_committed_len and up_to % self.page_size == 0 and up_to > 0:
            offers = [(up_to, int(req.kv.mamba_pool_idx), kind)]
        commit = self._commit(req, up_to, offers, finished=True)
        if offers and not commit.refused:
            req.kv.mamba_pool_idx = None
        else:
            self.req_to_token_pool.free_mamba_cache(req)
        req.lock = None
        self._publish()

    def _commit(
        self, req: Req, up_to: int, offers: list[tuple[int, int, Kind]], *, finished: bool
    ) -> Commit:
        """Hand [cache_protected_len, up_to) to the tree; adopt its blocks where it had some."""
        start = req.kv.cache_protected_len
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        end = up_to // self.page_size * self.page_size
        mine = to_ids(row[start : end : self.page_size]) // self.page_size
        commit = self.cache.commit(
            req.lock.pin,
            _tokens(req.full_untruncated_fill_ids)[:up_to],
            _namespace(req),
            mine,
            offers,
            finished=finished,
        )
        for first, last in commit.duplicates:
            self.token_to_kv_pool_allocator.free_segment(row[first:last].clone(), start_pos=first)
            theirs = commit.blocks[
                (first - start) // self.page_size : (last - start) // self.page_size
            ]
            self.req_to_token_pool.write(
                (req.kv.req_pool_idx, slice(first, last)),
                self._token_ids(theirs).to(row.dtype),
            )
        req.kv.cache_protected_len = commit.kept_len
        return commit

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """The row is gone; so is a state that was not given to the tree."""
        if self.trace is not None and req.finished():
            self.trace.finished(req.rid, len(req.output_ids))
        self._drop_capture(req)
        if req.kv.holds_mamba:
            assert not checkpointed, f"{req.rid} was checkpointed but kept its state"
            self.req_to_token_pool.free_mamba_cache(req)

    def _drop_capture(self, req: Req) -> None:
        capture = _take(req, "kimi_k3_capture")
        if capture is not None:
            self._free_states((capture.slot,))

    def _free_states(self, slots: Sequence[int]) -> None:
        if slots:
            self.arena.free(np.array(slots, dtype=np.int64), NO_IDS)

    # -- memory --

    def make_room(self, *, states: int, blocks: int) -> bool:
        """Evict until the arena fits both; False, with nothing evicted, if it cannot."""
        self.token_to_kv_pool_allocator.flush_held_frees()
        return self.cache.evict(states, blocks)

    def _acquire(self, states: int, blocks: int) -> Any:
        self.token_to_kv_pool_allocator.flush_held_frees()
        return self.cache.acquire(states, blocks)

    def _kept(self) -> tuple[int, int]:
        """States and blocks that would be left if everything evictable were evicted."""
        pool = self.arena.pool
        return (
            pool.live_states + pool.retired_states - self.cache.evictable_states,
            pool.live_blocks + pool.retired_blocks - self.cache.evictable_blocks,
        )

    def reclaimable_blocks(self) -> int:
        """Blocks that fit if everything evictable were evicted."""
        geometry, (states, blocks) = self.arena.geometry, self._kept()
        return geometry.blocks_above(geometry.state_end(states)) - blocks

    def reclaimable_states(self) -> int:
        """States that fit if everything evictable were evicted."""
        geometry, (states, blocks) = self.arena.geometry, self._kept()
        return geometry.states_below(geometry.block_start(blocks)) - states

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang passes shortfalls; both are met together or nothing is evicted."""
        before = self.cache.evictable_blocks, self.cache.evictable_states
        pool = self.arena.pool
        blocks = -(-params.num_tokens // self.page_size)
        states = params.mamba_num
        self.make_room(
            states=states + pool.fundable_states() if states else 0,
            blocks=blocks + pool.fundable_blocks() if blocks else 0,
        )
        return EvictResult(
            num_tokens_evicted=(before[0] - self.cache.evictable_blocks) * self.page_size,
            mamba_num_evicted=before[1] - self.cache.evictable_states,
        )

    def evict_for_alloc(
        self,
        params: EvictParams,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> EvictResult:
        """Same as `evict`: one order over both kinds already stops at the demand."""
        assert allocation_reclaim_satisfied is None, "joint reclaim belongs to other allocators"
        return self.evict(params)

    def reset(self) -> None:
        """Forget everything; SGLang clears the pools right after (`flush_cache`)."""
        self.cache.flush()

    # -- sizes, in SGLang's units: tokens of KV, slots of states --

    def full_evictable_size(self) -> int:
        """Tokens of KV that eviction could free."""
        return self.cache.evictable_blocks * self.page_size

    def full_protected_size(self) -> int:
        """Tokens of KV under a pin."""
        return self.cache.protected_blocks * self.page_size

    def mamba_evictable_size(self) -> int:
        """States that eviction could free."""
        return self.cache.evictable_states

    def mamba_protected_size(self) -> int:
        """States under a pin."""
        return self.cache.protected_states

    evictable_size = full_evictable_size
    protected_size = full_protected_size

    def total_size(self) -> int:
        """Tokens of KV in the tree."""
        return self.full_evictable_size() + self.full_protected_size()

    # -- checks and reports --

    def violations(self) -> list[str]:
        """Recount the tree from scratch."""
        return self.cache.violations() if self.options.check else []

    def sanity_check(self) -> None:
        """Raise on any violation (SGLang's debug switch)."""
        found = self.cache.violations()
        assert not found, "\n".join(found)

    def available_and_evictable_str(self) -> str:
        """For SGLang's out-of-memory messages."""
        return f"{self.arena.pool.report()} {self.cache.report()}\n"

    def pretty_print(self) -> None:
        """Print the same (SGLang calls it before it raises)."""
        print(self.available_and_evictable_str())  # noqa: T201  # SGLang's contract

    def _publish(self) -> None:
        if self.metrics is not None:
            self.metrics.publish()

    def _tensor(self, ids: IdArray) -> torch.Tensor:
        return torch.from_numpy(ids).to(self.arena.device)

    def _token_ids(self, blocks: IdArray) -> torch.Tensor:
        if self.page_size > 1:
            offsets = np.arange(self.page_size, dtype=np.int64)
            blocks = (blocks[:, None] * self.page_size + offsets).ravel()
        return self._tensor(blocks)


def _result(length: int, node: Match | None) -> MatchResult:
    return MatchResult(
        device_prefix_len=length,
        last_device_node=node,
        last_host_node=node,
        best_match_node=node,
    )


def _take(req: Req, name: str) -> Any:
    """Read and clear an attribute of ours on SGLang's request."""
    return req.__dict__.pop(name, None)


def _tokens(ids: Any) -> TokenArray:
    """A request's token ids (`array('q')`) as an int64 copy: a view would freeze SGLang's array."""
    return np.array(ids, dtype=np.int64)


def _namespace(owner: Any) -> Namespace:
    """What separates tenants: `extra_key` (SGLang puts the LoRA id in it) and the cache salt."""
    return (owner.extra_key, owner.cache_salt or None)
