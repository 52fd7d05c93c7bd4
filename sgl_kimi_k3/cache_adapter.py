"""SGLang's prefix cache interface over `radix.PrefixCache`: SGLang's words stop here.

`resume.py` takes what a request needs to go on from a state, `capture.py` takes states while it
runs, `handover.py` publishes them; this is the face that SGLang's scheduler sees.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    MatchResult,
)
from sglang.srt.mem_cache.common import coalesce_ranges

from radix import CacheConfig, Costs, Kind, PrefixCache
from sgl_kimi_k3.answers import Answers
from sgl_kimi_k3.capture import Captures
from sgl_kimi_k3.decisions import DecisionLog
from sgl_kimi_k3.gate import Gate
from sgl_kimi_k3.handover import Handover, Lock
from sgl_kimi_k3.keys import namespace_of, tokens_of
from sgl_kimi_k3.metrics import Metrics
from sgl_kimi_k3.observer import Observer
from sgl_kimi_k3.resume import Resumes
from sgl_kimi_k3.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import (
        DecLockRefParams,
        EvictParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from mempool import Geometry
    from radix import Match
    from sgl_kimi_k3.boundaries import BoundaryRule
    from sgl_kimi_k3.capture import Copies
    from sgl_kimi_k3.config import Options
    from sgl_kimi_k3.pool_adapter import ArenaAllocator
    from sgl_kimi_k3.trace import TraceWriter

logger = logging.getLogger(__name__)

# Opportunistic states leave room for new work: these states and one part in so many of the arena.
RESERVED_STATES = 2
RESERVED_SHARE = 8


class KimiK3Cache(BasePrefixCache):
    """The tree SGLang's scheduler drives under `--radix-cache-backend kimi_k3`.

    Args:
        params: SGLang's pools and flags.
        options: ours.
        rule: message ends, or None.
        kernel_chunk: the KDA kernel's chunk if it writes states inside a pass, else 0.
        track_interval: tokens between the states an answer leaves (raised to a multiple of the
            grid, as stock does); 0 = off.
        trace: where served requests are recorded, or None.
    """

    def __init__(
        self,
        params: CacheInitParams,
        options: Options,
        *,
        rule: BoundaryRule | None,
        kernel_chunk: int = 0,
        track_interval: int = 0,
        trace: TraceWriter | None = None,
    ) -> None:
        self.disable = params.disable
        self.page_size = params.page_size
        rows = self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator: ArenaAllocator = params.token_to_kv_pool_allocator
        self.sliding_window_size = None
        self.root_node = None
        self.arena = self.token_to_kv_pool_allocator.arena
        geometry = self.arena.geometry
        self.options = options
        self.observer = Observer(self.arena, options, block_size=self.page_size, trace=trace)
        self.cache = PrefixCache(
            self.observer.pool,
            _cache_config(geometry, options, dense=options.grid if kernel_chunk else 0),
        )
        self.token_to_kv_pool_allocator.tree = self
        flush_held_frees = self.token_to_kv_pool_allocator.flush_held_frees
        self.room = Room(self.cache, self.arena, flush_held_frees)
        self.resumes = Resumes(self.cache, self.arena, self.room, step_tokens=rows.step_tokens)
        self.gate = Gate(
            self.cache,
            self.arena,
            self.room,
            state_tokens=self.token_to_kv_pool_allocator.mamba_slot_full_token_cost(),
            limit=options.overtake,
        )
        self.captures = Captures(
            self.cache,
            self.arena,
            rows,
            rule=rule,
            kernel_chunk=kernel_chunk,
            grid=options.grid,
            step_blocks=rows.step_blocks,
            flush_held_frees=flush_held_frees,
        )
        self.handover = Handover(
            self.cache,
            self.arena,
            rows=rows,
            allocator=self.token_to_kv_pool_allocator,
            captures=self.captures,
            observer=self.observer,
        )
        self.answers = Answers(
            self.captures,
            self.handover,
            every=math.lcm(options.grid, track_interval) if options.opportunistic else 0,
            interval=options.interval,
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
        counts states, refuses the request for now.  It is also "no prefix" where the state and the
        block to copy from would leave the request no room in an arena of its own: cold it fits.
        """
        key = params.key
        if self.disable or len(key) == 0:
            return _result(0, None, 0)
        match = self.cache.match(tokens_of(key.token_ids), namespace_of(key), limit=len(key))
        resumed = match.resume_len
        if resumed and params.cow_mamba:
            req = params.req
            if not (self.resumes.fits(req) and self.resumes.take_live_slot(req, match)):
                return _result(0, match.unresumed(), 0)
        return _result(resumed, match, resumed - resumed % self.page_size)

    def path_device_indices(self, node: Match | None) -> torch.Tensor:
        """Token ids of the matched prefix: int64 [resume_len]."""
        if node is None or node.resume_len == 0:
            return torch.empty(0, dtype=torch.int64, device=self.arena.device)
        return self.handover.token_ids(self.cache.path_blocks(node))[: node.resume_len]

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """Token ids of the prefix a new request matched; its row starts with these blocks."""
        blocks = self.resumes.take_blocks(req)
        if blocks is None:
            raise RuntimeError(
                f"no block for the prefix of {req.rid}, which was admitted with one: "
                + self.available_and_evictable_str()
            )
        req.kimi_k3_prefix = blocks
        return self.handover.token_ids(blocks)[: req.prefix_len]

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
            req.__dict__.pop("kimi_k3_expected", None)
            if not req.retracted_stain:
                self.gate.came(req)
            self.cache.touch(req.lock.pin)
            self.observer.admitted(self.cache, req)

    def launched(self, reqs: list[Req], copies: Copies) -> None:
        """A prefill of these was launched: copy what it leaves.

        The states they resumed from are copied by now and need no pin.
        """
        if copies.states:
            self.arena.copy_states(copies.states)
        if copies.blocks:
            self.arena.copy_blocks(copies.blocks)
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
            self.handover.finish(req, up_to, Kind.TURN_END)
        else:
            self.handover.publish(req, up_to)

    def retract(self, req: Req) -> None:
        """SGLang takes a running request's memory: leave its latest state in the tree."""
        if not req.finished():
            self.observer.retracted += 1
            self.abandon(req)

    def abandon(self, req: Req) -> None:
        """Before SGLang frees what an unfinished request holds: leave all of it in the tree.

        The live state and the KV behind it become evictable like any other, so that memory needed
        now still comes from whatever is least valuable.  Not what SGLang bars from the tree.
        """
        barred = self.disable or req.skip_radix_cache_insert
        if not barred and req.kv.holds_kv and req.kv.holds_mamba:
            req.refresh_fill_ids()
            self.handover.finish(req, req.kv.kv_committed_len, Kind.RETRACT)

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

    def evict(self, params: EvictParams) -> EvictResult:
        """SGLang passes shortfalls; both are met together or nothing is evicted."""
        before = self.cache.evictable_blocks, self.cache.evictable_states
        pool = self.arena.pool
        blocks = -(-params.num_tokens // self.page_size)
        states = params.mamba_num
        self.room.make(
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
        """Raise on any violation (SGLang's debug switch); unlike `idle` it waits for the device."""
        found = self.arena.violations() + self.cache.violations()
        assert not found, "\n".join(found)

    def available_and_evictable_str(self) -> str:
        """For SGLang's out-of-memory messages."""
        return f"{self.arena.pool.report()} {self.cache.report()}\n"

    def pretty_print(self) -> None:
        """Print the same (SGLang calls it before it raises)."""
        print(self.available_and_evictable_str())  # noqa: T201  # SGLang's contract


def _cache_config(geometry: Geometry, options: Options, *, dense: int) -> CacheConfig:
    return CacheConfig(
        block_size=geometry.block_size,
        grid=options.grid,
        interval=options.interval,
        opportunistic=options.opportunistic,
        dense=dense,
        probation=options.probation,
        ghost_tokens=options.ghost_tokens,
        reserve_states=RESERVED_STATES,
        reserve_blocks=geometry.max_blocks // RESERVED_SHARE,
        costs=Costs(
            state_bytes=geometry.state_bytes,
            token_bytes=geometry.block_bytes // geometry.block_size,
        ),
    )


def _result(length: int, node: Match | None, protected_len: int) -> MatchResult:
    return MatchResult(
        device_prefix_len=length,
        cache_protected_len=protected_len,
        last_device_node=node,
        last_host_node=node,
        best_match_node=node,
    )
