"""SGLang's own request, admission and allocation code over our pool and tree, without a model."""

from __future__ import annotations

from array import array
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    Req,
    ScheduleBatch,
    release_req,
)
from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kimi_k3 import gate, scheduler, state_pass
from tests.plugin.memory import Memory, fold


class World(Memory):
    """One scheduler: its memory, its queue and its running requests."""

    pass_tokens = 4096  # of one prefill pass, SGLang's `max_prefill_tokens`

    def __init__(
        self, *, chunk: int = 64, overlap: bool = False, beside: bool = False, **sizes: Any
    ) -> None:
        super().__init__(chunk=chunk, **sizes)
        self.chunk = chunk
        self.overlap = overlap
        self.beside = beside  # other data-parallel ranks always have work; this one joins them idle
        self.kernel_writes = True  # whether the prefill kernel knows of the states it is asked for
        self._inflight: list[tuple[list[tuple[Req, int]], bool]] = []
        self._unseen: dict[str, list[int]] = {}  # sampled tokens by request, on the device
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            waiting_queue=[],
            policy=SimpleNamespace(
                policy=CacheAgnosticPolicy.FCFS, enable_priority_scheduling=False
            ),
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
        )
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self._serial = 0
        self._decoding = torch.empty(0, dtype=torch.int64)  # rows of the last decode step

    # -- requests --

    def request(self, prompt: list[int], new: int = 4, **fields: object) -> Req:
        """Queue a request."""
        self._serial += 1
        req = Req(
            f"r{self._serial}",
            "",
            array("q", prompt),
            SamplingParams(max_new_tokens=new),
            vocab_size=1 << 20,
            **fields,
        )
        req.sampling_params.normalize(None)
        self.waiting.append(req)
        return req

    def run(self, *requests: Req) -> None:
        """Step until these are finished."""
        for _ in range(2000):
            if all(req.finished() for req in requests):
                return
            self.step()
        raise AssertionError("no progress")

    def serve(self, prompt: list[int], new: int = 4, **fields: object) -> Req:
        """Queue one request and run it to its end."""
        req = self.request(prompt, new, **fields)
        self.run(req)
        return req

    # -- the scheduler's loop, prefill first as SGLang does --

    def step(self) -> None:
        """Launch one forward pass; process its result now, or under overlap one step later."""
        if self.chunked is not None:
            checkpoint_kv_cache(self.chunked, self.tree)
        launched = None
        batch = self._admit()
        if batch:
            launched = self._prefill(batch)
        elif self.running:
            launched = self._decode()
        if launched is None and self.beside:
            launched = ([], False)
        if launched is not None:
            self._inflight.append(launched)
        while len(self._inflight) > (self.overlap and launched is not None):
            self._process(*self._inflight.pop(0))
        self.check()

    def drain(self) -> None:
        """Process every result that is on its way."""
        while self._inflight:
            self._process(*self._inflight.pop(0))

    def _admit(self) -> list[Req]:
        if not self.waiting and self.chunked is None:
            return []
        if not self.chunked and len(self.rows.free_slots) == 0:
            return []
        running = SimpleNamespace(
            reqs=self.running, batch_size=lambda: len(self.running), batch_is_full=False
        )
        self.scheduler.waiting_queue, self.scheduler.chunked_req = self.waiting, self.chunked
        batch: list[Req] = gate.new_prefill(self._new_prefill, self.scheduler, running)
        self.waiting = self.scheduler.waiting_queue
        return batch

    def _new_prefill(self, state: SimpleNamespace, running: SimpleNamespace) -> list[Req]:
        """`Scheduler.get_new_batch_prefill`, as far as it matters here."""
        if not state.waiting_queue and self.chunked is None:
            return []
        adder_class = scheduler.prefill_adder_class(lambda _: PrefillAdder, self.scheduler)
        page_size = self.page_size // self.dcp  # SGLang passes one rank's
        adder = adder_class(
            page_size, self.tree, self.allocator, running, 0.5, self.pass_tokens, self.chunk
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        self.rows.mamba_allocator.alloc_group_begin(len(state.waiting_queue))
        for req in state.waiting_queue:
            held = sum(r.kv.holds_kv for r in adder.can_run_list)
            if len(adder.can_run_list) - held >= self.rows.available_size():
                break
            req.init_next_round_input(self.tree)
            result = adder.add_one_req(
                req, has_chunked_req=self.chunked is not None, truncation_align_size=None
            )
            if not (adder.can_run_list and adder.can_run_list[-1] is req):
                req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
                if req.kv.holds_mamba:
                    self.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
                    req.kv.mamba_pool_idx = None
            if result.name != "CONTINUE":
                running.batch_is_full = result.name == "NO_TOKEN"
                break
        self.rows.mamba_allocator.alloc_group_end()
        admitted = set(map(id, adder.can_run_list))
        state.waiting_queue = [req for req in state.waiting_queue if id(req) not in admitted]
        if adder.new_chunked_req is not None:
            assert self.chunked is None, "two unfinished prefills"
            self.chunked = adder.new_chunked_req
        return adder.can_run_list

    def _batch(self, reqs: list[Req], ends: list[int]) -> SimpleNamespace:
        prefixes = [req.prefix_len for req in reqs]
        return SimpleNamespace(
            reqs=reqs,
            device=self.device,
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(), is_encoder_decoder=False
            ),
            prefix_lens=prefixes,
            extend_lens=[end - start for start, end in zip(prefixes, ends, strict=True)],
            extend_num_tokens=sum(ends) - sum(prefixes),
            seq_lens=torch.tensor(ends, device=self.device),
            seq_lens_cpu=torch.tensor(ends),
        )

    def _prefill(self, reqs: list[Req]) -> tuple[list[tuple[Req, int]], bool]:
        batch = self._batch(reqs, [req.extend_end for req in reqs])
        alloc_for_extend(batch)
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, reqs)
        translate = self.rows.translate_mamba_indices
        if batch.mamba_clear_indices is not None:
            self.rows.mamba_pool.clear_slots(translate(batch.mamba_clear_indices))
        if batch.mamba_cow_src_indices is not None:
            self.rows.copy_mamba_state(
                translate(batch.mamba_cow_src_indices), translate(batch.mamba_cow_dst_indices)
            )
        scheduler.prepare_for_extend(lambda _: None, batch)
        scheduler.forward(self._run_pass, None, batch)
        done = [req for req in reqs if req is not self.chunked]
        self.running += done
        return [(req, self._sample(req)) for req in done], True

    def _run_pass(self, _worker: None, batch: SimpleNamespace) -> None:
        """One prefill: the states its plan names are written where the plan says."""
        written = []
        writing = state_pass.current()
        if writing is not None and self.kernel_writes:
            plan = writing.plan
            if not self.temporal.is_meta:
                written = list(zip(plan.slots.tolist(), plan.ends.tolist(), strict=True))
            writing.convolved = writing.walked = True
        start = 0  # of the request's tokens among the batch's
        for req, prefix, length in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            tokens = self._on_device(req)
            for slot, end in written:
                if start < end < start + length:
                    self.temporal[0, slot] = fold(tokens[: prefix + end - start])
            self._forward(req, prefix, prefix + length)
            start += length

    def _process(self, results: list[tuple[Req, int]], is_prefill: bool) -> None:
        self.allocator.free_group_begin()
        for req, token in results:
            if req.finished():
                continue  # its end was known only after this step was launched
            req.output_ids.append(token)
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
                self.running.remove(req)
                release_kv_cache(req, self.tree, checkpoint=True)
            elif is_prefill:
                checkpoint_kv_cache(req, self.tree)
        self.allocator.free_group_end()

    def _decode(self) -> tuple[list[tuple[Req, int]], bool] | None:
        if not self.before_decode():
            return None
        while not self.allocator.check_decode_capacity(
            num_tokens=self._next_tokens(), tree_cache=self.tree
        ):
            if len(self.running) == 1:
                self.abort(self.running[0])
                return None
            self.retract(self.running[-1])
        reqs = list(self.running)
        tokens = self._extend_rows(reqs)
        batch = self._batch(reqs, [req.kv.kv_committed_len for req in reqs])
        scheduler.prepare_for_decode(lambda _: None, batch)

        def run_step(*_: object) -> None:
            for req in reqs:
                self._forward(req, req.kv.kv_committed_len - tokens, req.kv.kv_committed_len)

        scheduler.forward(run_step, None, batch)
        return [(req, self._sample(req)) for _ in range(tokens) for req in reqs], False

    def _extend_rows(self, reqs: list[Req]) -> int:
        """Take memory for the next token of each; how many tokens that is."""
        batch = self._batch(reqs, [req.kv.kv_committed_len for req in reqs])
        rows = [req.kv.req_pool_idx for req in reqs]
        if rows != self._decoding.tolist():  # SGLang's batch keeps the tensor while rows stay
            self._decoding = torch.tensor(rows)
        batch.req_pool_indices_cpu = self._decoding
        batch.req_pool_indices = batch.req_pool_indices_cpu.to(self.device)
        alloc_for_decode(batch, 1)
        return 1

    def _next_tokens(self) -> int:
        """No less than `ScheduleBatch.new_tokens_required_next_decode`: the blocks that begin.

        A token each where none begins, so that a test can be short of memory inside a block.
        """
        size = self.page_size
        begin = sum(req.kv.kv_committed_len % size == 0 for req in self.running)
        return max(size * begin, len(self.running))

    def retract(self, req: Req) -> None:
        """What SGLang's `release_req` does, with our hook around it."""
        self.running.remove(req)
        self._forget_inflight(req)
        self.tree.retract(req)
        release_kv_cache(req, self.tree, checkpoint=False)
        req.reset_for_retract()
        self.waiting.append(req)

    def before_decode(self) -> bool:
        """Our hook before SGLang prepares a decode step or retracts for it; False: not now."""

        def check_decode_mem() -> bool:
            return self.allocator.check_decode_capacity(
                num_tokens=self._next_tokens(), tree_cache=self.tree
            )

        batch = SimpleNamespace(
            is_empty=lambda: not self.running,
            check_decode_mem=check_decode_mem,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
        )
        state = SimpleNamespace(
            chunked_req=self.chunked,
            forward_ct=0,
            tree_cache=self.tree,
            result_queue=self.result_queue(),
            _add_request_to_queue=lambda req, **_: self.waiting.append(req),
        )
        with mock.patch.object(
            schedule_batch, "release_req", partial(scheduler.release_retracted, release_req)
        ):
            go_on = scheduler.update_running_batch(lambda *_: True, state, batch)
        self.chunked = state.chunked_req
        return bool(go_on)

    def result_queue(self) -> list[tuple[SimpleNamespace, None]]:
        """SGLang's, as far as we look: the batches whose results are to come."""
        return [
            (SimpleNamespace(reqs=[req for req, _ in step]), None) for step, _ in self._inflight
        ]

    def abort(self, req: Req) -> None:
        """Abort in whatever phase the request is."""
        req.finished_reason = FINISH_ABORT("test")
        self._forget_inflight(req)
        if req in self.waiting:
            self.waiting.remove(req)
            release_kv_cache(req, self.tree, checkpoint=False)
        elif req is self.chunked:
            pending = SimpleNamespace(
                _pending_chunked_abort_req=req, chunked_req=req, tree_cache=self.tree
            )
            scheduler.abort_unfinished(lambda _: None, pending)
            self.chunked = None
            release_kv_cache(req, self.tree, checkpoint=False)
        else:
            self.running.remove(req)
            release_kv_cache(req, self.tree, checkpoint=True)

    def _forget_inflight(self, req: Req) -> None:
        """A result that is still to come is dropped, as SGLang drops it."""
        self._unseen[req.rid] = list(req.output_ids)
        self._inflight = [
            ([(other, token) for other, token in results if other is not req], is_prefill)
            for results, is_prefill in self._inflight
        ]

    # -- what a forward pass would do --

    def _forward(self, req: Req, start: int, end: int) -> None:
        self.compute(req, self._on_device(req), start, end)

    def _on_device(self, req: Req) -> list[int]:
        """Prompt and every token sampled so far, also those the host has not seen yet."""
        known = [*req.origin_input_ids, *req.output_ids]
        return known + self._unseen.get(req.rid, [])[len(req.output_ids) :]

    def _sample(self, req: Req) -> int:
        length = len(self._on_device(req))
        token = 100 + (length * 7 + int(req.origin_input_ids[0])) % 50
        self._unseen.setdefault(req.rid, list(req.output_ids)).append(token)
        return token

    def check(self) -> None:
        """Pool, tree, and conservation of every token and state."""
        assert self.chunked not in self.running
        self.check_books([*self.running, *([self.chunked] if self.chunked else [])], self.waiting)
