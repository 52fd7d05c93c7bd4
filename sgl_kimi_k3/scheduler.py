"""From stops to chunk lengths: SGLang's prefill admission, cut where states are kept.

No tree access here; the cache adapter answers "where is this request's next stop".
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import retract_all
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.runtime_context import get_memory, get_parallel, get_schedule

from sgl_kimi_k3.config import BACKEND
from sgl_kimi_k3.memory_plan import unit_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import _PrefillAdmission

    from sgl_kimi_k3.cache_adapter import KimiK3Cache
    from sgl_kimi_k3.capture import Capture, Copies
    from sgl_kimi_k3.state_pass import Writing

logger = logging.getLogger(__name__)

TEST_RETRACT: bool = envs.SGLANG_TEST_RETRACT.get()
TEST_RETRACT_INTERVAL: int = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


class StopAwareAdder(PrefillAdder):
    """Lets a prefill end where a state is kept, and its followers wait for that state.

    A request that shares a prefix on which another one is about to leave a state (planned in this
    pass, or written by a forward whose result is not processed yet) waits for it, so that a burst
    with one new prefix computes it once.

    Where states are captured by cutting chunks, SGLang tracks one request whose prefill is
    unfinished.  While there is one, a request that needs a cut of its own waits as well, except
    that opportunistic stops are skipped instead.
    """

    tree_cache: KimiK3Cache

    def __init__(
        self,
        page_size: int,  # noqa: ARG002  # one rank's; under DCP a block is one page of each rank
        tree_cache: KimiK3Cache,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(tree_cache.page_size, tree_cache, *args, **kwargs)
        # SGLang adds evictable states to free ones; what counts is which states fit once both
        # kinds have been evicted.
        self.rem_mamba_slots = self.tree_cache.room.reclaimable_states()
        self.tree_cache.observer.stepped()
        self._leaders: list[Req] = list(self.tree_cache.captures.uncommitted)
        self._unfinished = False  # whether a prefill stays unfinished after this pass

    def _select_prefill_admission(
        self, req: Req, *, has_chunked_req: bool = False, **kwargs: Any
    ) -> _PrefillAdmission | AddReqResult:
        admission = super()._select_prefill_admission(
            req, has_chunked_req=has_chunked_req, **kwargs
        )
        if isinstance(admission, AddReqResult):
            return admission
        captures = self.tree_cache.captures
        if any(captures.worth_waiting(leader, req) for leader in self._leaders):
            return AddReqResult.OTHER
        occupied = has_chunked_req or self._unfinished
        if occupied and admission.is_chunked:
            return AddReqResult.OTHER
        captures.plan(req)
        end = admission.prefix_len + admission.extend_len
        cut = captures.next_cut(req, limit=end, only_firm=occupied)
        if cut is None:
            return admission
        if occupied:
            return AddReqResult.OTHER
        return replace(
            admission, extend_len=cut - admission.prefix_len, is_chunked=True, max_new_tokens=0
        )

    def _commit_prefill_admission(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super()._commit_prefill_admission(req, *args, **kwargs)
        self.tree_cache.admitted(req)
        self._leaders.append(req)
        if self.new_chunked_req is req:
            self._hold_back(req)

    def add_chunked_req(self, req: Req) -> Req | None:
        """Continue the one unfinished prefill, up to its next stop."""
        end = len(req.full_untruncated_fill_ids)
        cut = self.tree_cache.captures.next_cut(req, limit=end, only_firm=False)
        if cut is not None:
            room = cut - req.prefix_len
            limit = self.chunked_req_limit
            self.chunked_req_limit = room if limit is None else min(limit, room)
        unfinished = super().add_chunked_req(req)
        self._leaders.append(req)
        if unfinished is not None:
            self._hold_back(unfinished)
        return unfinished

    def _hold_back(self, req: Req) -> None:
        """Note the unfinished prefill and leave room for the rest of its prompt.

        Requests admitted beside it must not take what its coming chunks need.
        """
        self._unfinished = True
        self.memory_budget.hold_back(len(req.full_untruncated_fill_ids) - req.extend_end)


def prefill_adder_class(original: Callable[..., type], scheduler: Any) -> type:
    """AROUND `Scheduler.get_prefill_adder_class`, every pass: ours where states are kept."""
    stock = original(scheduler)
    if not keeps_states(scheduler.tree_cache):
        return stock
    tree_cache = scheduler.tree_cache
    tree_cache.resumes.expect(scheduler.waiting_queue, tree_cache.gate.due())
    tree_cache.captures.waiting = scheduler.waiting_queue
    return StopAwareAdder


def prepare_for_extend(original: Callable[..., None], batch: Any) -> None:
    """AROUND `ScheduleBatch.prepare_for_extend`: take the slots that this forward will fill.

    After SGLang's own allocations, so that an optional state never takes what they were promised.
    """
    original(batch)
    if keeps_states(batch.tree_cache):
        captures = batch.tree_cache.captures
        ends = [captures.at_end(req) for req in batch.reqs]
        inside = [captures.inside(req) for req in batch.reqs]
        batch.kimi_k3_copies = captures.copies(batch.reqs, ends, inside)
        batch.kimi_k3_inside = inside


def prepare_for_decode(original: Callable[..., None], batch: Any) -> None:
    """AROUND `ScheduleBatch.prepare_for_decode`: states that the answers leave in this step.

    Not of requests that draft: their live states are advanced behind the forward.
    """
    original(batch)
    if keeps_states(batch.tree_cache) and batch.req_to_token_pool.windows is None:
        left = getattr(batch, "kimi_k3_copies", None)
        assert left is None, f"a step never ran, states it was to leave hold nothing: {left}"
        copies = batch.tree_cache.answers.step(batch.reqs, batch.seq_lens_cpu.numpy())
        if copies is not None:
            batch.kimi_k3_copies, batch.kimi_k3_inside = copies, []


def forward(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND `TpModelWorker.forward_batch_generation`: the states a forward leaves.

    Those inside a prefill are written by its kernels, those at its end, and at that of a decode
    step, copied right behind it.
    """
    batch = args[0] if args else kwargs.get("batch")
    tree_cache = getattr(batch, "tree_cache", None)
    copies: Copies | None = getattr(batch, "kimi_k3_copies", None)
    if copies is None:
        result = original(worker, *args, **kwargs)
    else:
        inside, batch.kimi_k3_copies, batch.kimi_k3_inside = batch.kimi_k3_inside, None, None
        with writing_inside(batch, inside) as written:
            result = original(worker, *args, **kwargs)
        if written is not None and not written.done:
            copies = tree_cache.captures.discard(batch.reqs, inside, copies)
        tree_cache.launched(batch.reqs, copies)
    if is_ours(tree_cache):
        tree_cache.observer.stepped()
    return result


def writing_inside(
    batch: Any, inside: list[list[Capture]]
) -> AbstractContextManager[Writing | None]:
    """Have the KDA prefill write these states, by request of the batch."""
    if not any(inside):
        return nullcontext()
    from sgl_kimi_k3.state_pass import Plan, writing  # noqa: PLC0415  # Triton: where a GPU is

    arena, chunk = batch.tree_cache.arena, batch.tree_cache.captures.kernel_chunk
    wanted = [
        (row, capture.depth - start, index)
        for row, (start, held) in enumerate(zip(batch.prefix_lens, inside, strict=True))
        for capture, index in zip(held, arena.state_indices([c.slot for c in held]), strict=True)
    ]
    return writing(Plan.of(batch.extend_lens, wanted, chunk), arena.device)


def release_retracted(original: Callable[..., bool], *, req: Req, **kwargs: Any) -> bool:
    """AROUND `schedule_batch.release_req`: a retracted request leaves its latest state."""
    tree_cache = kwargs["tree_cache"]
    if is_ours(tree_cache):
        tree_cache.retract(req)
    return original(req=req, **kwargs)


def abort_unfinished(original: Callable[..., None], scheduler: Any) -> None:
    """AROUND `Scheduler.process_pending_chunked_abort`: an aborted prefill leaves what it computed.

    Stock frees all of it.  The live state stands at the end of the last launched chunk.
    """
    req: Req | None = scheduler._pending_chunked_abort_req  # noqa: SLF001  # no accessor
    if req is not None and req is scheduler.chunked_req and keeps_states(scheduler.tree_cache):
        scheduler.tree_cache.abandon(req)
    original(scheduler)


def update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND `Scheduler.update_running_batch`: where memory is short, lose no work to it.

    While a step is in flight, its tokens are not known: a request retracted now would drop its own,
    and its state, which contains all known tokens, could not be resumed.  So nothing is launched
    for one step, as stock does where requests are about to finish.  Under DP attention the rank
    joins the others' forward idle meanwhile; such a step has no requests and is not waited for.

    Then an unfinished prefill gives way first.  Stock retracts running requests only and aborts the
    last one, although the prefill may hold the rest of the memory.  It leaves its state and KV in
    the tree and goes on from there, unless they are needed.
    """
    if not keeps_states(scheduler.tree_cache) or batch.is_empty():
        return original(scheduler, batch)
    full = not batch.check_decode_mem()
    if not full and not retraction_is_tested(scheduler):
        return original(scheduler, batch)
    if any(step.reqs for step, _ in getattr(scheduler, "result_queue", ())):
        batch.batch_is_full = False
        return None
    req: Req | None = scheduler.chunked_req
    if full and req is not None:
        scheduler.chunked_req = None
        retract_all(
            reqs=[req],
            req_to_token_pool=batch.req_to_token_pool,
            token_to_kv_pool_allocator=batch.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        logger.warning("KV cache pool is full: the unfinished prefill of %s gives way", req.rid)
        scheduler._add_request_to_queue(req, is_retracted=True)  # noqa: SLF001  # as stock does
    return original(scheduler, batch)


def retraction_is_tested(scheduler: Any) -> bool:
    """Whether SGLang retracts in this step without need (`SGLANG_TEST_RETRACT`)."""
    return TEST_RETRACT and scheduler.forward_ct % TEST_RETRACT_INTERVAL == 0


def keeps_states(tree_cache: Any) -> bool:
    """Whether the tree is ours and not switched off by `--disable-radix-cache`."""
    return is_ours(tree_cache) and not tree_cache.disable


def is_ours(tree_cache: Any) -> bool:
    """Whether SGLang's tree cache is this backend's."""
    from sgl_kimi_k3.cache_adapter import KimiK3Cache  # noqa: PLC0415  # imported by it

    return isinstance(tree_cache, KimiK3Cache)


SHORT_REQUEST_TOKENS = 1000  # a row costs device memory for the whole context length


def max_running_requests(original: Callable[..., int], configurator: Any, tokens: int) -> int:
    """AROUND `KVCacheConfigurator.resolve_max_num_reqs`: no static number of states per request.

    Stock caps concurrency at `max_mamba_cache_size // 3..5`, whatever was asked for.  Here
    admission counts bytes, so what was asked for stands.  Unasked, there is a row for every short
    request that the arena holds, however SGLang's flags would have split it.
    """
    if get_memory().radix_cache_backend != BACKEND or configurator.mambaish_config is None:
        return original(configurator, tokens)
    schedule = get_schedule()
    if schedule.max_running_requests is not None:
        return max(1, schedule.max_running_requests // configurator.attn_dp_size)
    state_bytes, token_bytes = unit_bytes_of(
        configurator.mambaish_config,
        configurator.model_config,
        configurator.kv_cache_dtype.itemsize,
    )
    arena = schedule.max_mamba_cache_size * state_bytes + tokens * token_bytes
    short = SHORT_REQUEST_TOKENS * token_bytes // get_parallel().attn_dcp_size
    return max(1, arena // (state_bytes + short))
