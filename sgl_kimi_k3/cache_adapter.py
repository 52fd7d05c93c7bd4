"""SGLang's prefix cache interface over `radix.PrefixCache`: SGLang's words stop here.

What a request owns, as regions of its row (positions are tokens):

    [0, cache_protected_len)          the tree's, pinned by `req.lock`
    [cache_protected_len, allocated)  the request's own until a commit publishes it
    mamba_pool_idx                    the request's live state, after the last computed token

How states get into slots is `capture`'s business.  Everything is enqueued with or right behind the
forward that leaves the state, so it is exact although the next step may already be launched when
the result is processed.  At the end the live state itself is given to the tree.
"""

from __future__ import annotations

import logging
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
from sglang.srt.mem_cache.common import coalesce_ranges

from mempool.storage import upload
from radix import CacheConfig, Costs, Kind, PrefixCache
from sgl_kimi_k3.capture import Capture, Captures
from sgl_kimi_k3.decisions import DecisionLog
from sgl_kimi_k3.keys import namespace_of, tokens_of
from sgl_kimi_k3.metrics import Metrics
from sgl_kimi_k3.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        DecLockRefParams,
        EvictParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from radix import Commit, IdArray, Match, Pin
    from sgl_kimi_k3.boundaries import BoundaryRule
    from sgl_kimi_k3.config import Options
    from sgl_kimi_k3.pool_adapter import ArenaAllocator
    from sgl_kimi_k3.trace import TraceWriter

logger = logging.getLogger(__name__)

# Opportunistic states leave room for new work: these states and one part in so many of the arena.
RESERVED_STATES = 2
RESERVED_SHARE = 8


@dataclass(slots=True)
class Lock:
    """SGLang's `req.lock`: the pin that protects a path, opaque to SGLang."""

    node: Match | None
    pin: Pin


class KimiK3Cache(BasePrefixCache):
    """The tree SGLang's scheduler drives under `--radix-cache-backend kimi_k3`."""

    def __init__(
        self,
        params: CacheInitParams,
        options: Options,
        *,
        rule: BoundaryRule | None,
        kernel_chunk: int = 0,
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
        self.observer = Observer(self.arena, options, block_size=self.page_size, trace=trace)
        self.cache = PrefixCache(
            self.observer.pool,
            CacheConfig(
                block_size=self.page_size,
                grid=options.grid,
                interval=options.interval,
                opportunistic=options.opportunistic,
                dense=options.grid if kernel_chunk else 0,
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
        self.captures = Captures(
            self.cache,
            self.arena,
            rule=rule,
            kernel_chunk=kernel_chunk,
            grid=options.grid,
            step_blocks=self.req_to_token_pool.size,
            flush_held_frees=self.token_to_kv_pool_allocator.flush_held_frees,
        )
        if options.check:
            self.arena.decisions = DecisionLog()
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
        self.observer.metrics = Metrics.of(self)

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
        match = self.cache.match(tokens_of(key.token_ids), namespace_of(key), limit=len(key))
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
            req.kv.mamba_pool_idx = self.arena.slots.of(int(grant.states[0]))[0]
        req.kv.mamba_cow_src_index = self.arena.slots.of(match.slot)
        req.kv.mamba_needs_clear = False
        return True

    def path_device_indices(self, node: Match | None) -> torch.Tensor:
        """Token ids of the matched prefix: int64 [resume_len]."""
        if node is None or node.resume_len == 0:
            return torch.empty(0, dtype=torch.int64, device=self.arena.device)
        return self._token_ids(self.cache.path_blocks(node))

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """Token ids of the prefix a new request matched; its row starts with these blocks."""
        blocks = self.cache.path_blocks(req.last_node)[: req.prefix_len // self.page_size]
        req.kimi_k3_prefix = blocks
        return self._token_ids(blocks)

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

    def admitted(self, req: Req) -> None:
        """The request was admitted: mark what it consumes and, the first time, count it."""
        if not self.disable:
            self.cache.touch(req.lock.pin)
            self.observer.admitted(self.cache, req)

    def launched(self, reqs: list[Req]) -> None:
        """A prefill of these was launched: states they resumed from are copied, need no pin."""
        for req in reqs:
            if req.lock is not None:
                self.cache.relax(req.lock.pin)

    def checkpoint(self, req: Req, *, up_to: int, **_: Any) -> None:
        """Publish what the request computed, if its live state stands on a stop or it finished."""
        if self.disable:
            if req.finished():
                self.req_to_token_pool.free_mamba_cache(req)
            return
        if req.finished():
            self._finish(req, up_to, Kind.TURN_END)
            return
        captures = self.captures.collect(req)
        if captures:
            commit = self._commit(req, up_to, captures, finished=False)
            req.lock = Lock(None, commit.pin)

    def retract(self, req: Req) -> None:
        """Before SGLang takes a running request's memory: leave its latest state in the tree.

        The state and the KV behind it become evictable like any other, so that memory needed now
        still comes from whatever is least valuable.
        """
        if req.finished():
            return
        self.observer.retracted += 1
        if self.disable or not (req.kv.holds_kv and req.kv.holds_mamba):
            return
        req.refresh_fill_ids()
        self._finish(req, req.kv.kv_committed_len, Kind.RETRACT)

    def _finish(self, req: Req, up_to: int, kind: Kind) -> None:
        """Publish what is held and the live state, if its depth can be named; free the rest."""
        held = self.captures.collect(req)
        offers = [one for one in held if one.depth < up_to]
        # The live state stands for a prompt end that is also the turn's end.
        self.captures.free(one.slot for one in held if one.depth >= up_to)
        live = None
        if up_to == req.kv.kv_committed_len and up_to % self.page_size == 0 and up_to > 0:
            live = Capture(up_to, self.arena.slots.read_one(req.kv.mamba_pool_idx), kind)
            offers.append(live)
        refused = self._commit(req, up_to, offers, finished=True).refused
        if live is not None and live.slot not in refused:
            req.kv.mamba_pool_idx = None
        req.lock = None
        if req.kv.holds_mamba:
            self.req_to_token_pool.free_mamba_cache(req)

    def _commit(self, req: Req, up_to: int, offers: list[Capture], *, finished: bool) -> Commit:
        """Hand [cache_protected_len, up_to) to the tree; adopt its blocks where it had some.

        Slots the tree refuses are freed, except the request's live one.
        """
        start, size = req.kv.cache_protected_len, self.page_size
        row, rows = req.kv.req_pool_idx, self.req_to_token_pool
        mine = rows.blocks(row, start // size, up_to // size)
        commit = self.cache.commit(
            req.lock.pin,
            tokens_of(req.full_untruncated_fill_ids)[:up_to],
            namespace_of(req),
            mine,
            [(one.depth, one.slot, one.kind) for one in offers],
            finished=finished,
            refused=self.captures.collect_refused(req),
        )
        self.observer.committed(offers, commit.refused)
        for first, last in commit.duplicates:
            same = slice((first - start) // size, (last - start) // size)
            self.token_to_kv_pool_allocator.free_blocks(mine[same])
            rows.put(row, first // size, commit.blocks[same])
            rows.write((row, slice(first, last)), self._token_ids(commit.blocks[same]))
        req.kv.cache_protected_len = commit.kept_len
        live = self.arena.slots.read_one(req.kv.mamba_pool_idx)
        self.captures.free(slot for slot in commit.refused if slot != live)
        return commit

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Give back block-aligned runs of a request's row; an end may be inside a block."""
        for start, stop in coalesce_ranges(ranges):
            blocks = self.req_to_token_pool.blocks(
                kv.req_pool_idx, start // self.page_size, -(-stop // self.page_size)
            )
            self.token_to_kv_pool_allocator.free_blocks(blocks)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """The row is gone; so is a state that was not given to the tree."""
        self.observer.released(req)
        self.captures.drop(req)
        if req.kv.holds_mamba:
            assert not checkpointed, f"{req.rid} was checkpointed but kept its state"
            self.req_to_token_pool.free_mamba_cache(req)

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

    def idle(self) -> list[str]:
        """Nothing runs: bring the metrics up to date; `violations`."""
        self.observer.idle()
        if self.arena.decisions is not None and self.arena.decisions.changed():
            logger.info("kimi_k3 idle after %s", self.arena.decisions)
        return self.violations()

    def violations(self) -> list[str]:
        """What a recount of pool and tree finds wrong, under `KIMI_K3_CHECK=1`."""
        if not self.options.check:
            return []
        return self.arena.pool.violations() + self.cache.violations()

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

    def _token_ids(self, blocks: IdArray) -> torch.Tensor:
        if self.page_size > 1:
            offsets = np.arange(self.page_size, dtype=np.int64)
            blocks = (blocks[:, None] * self.page_size + offsets).ravel()
        return upload(blocks, self.arena.device)


def _result(length: int, node: Match | None) -> MatchResult:
    return MatchResult(
        device_prefix_len=length,
        last_device_node=node,
        last_host_node=node,
        best_match_node=node,
    )
