"""SGLang's own request, admission and allocation code over our pool and tree, without a model.

A "state" is a fold of the tokens it contains and a KV row is its token, written into the real
bytes after every step and checked at every resume: what a forward pass would read.
"""

from __future__ import annotations

from array import array
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING
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
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sgl_kimi_k3 import scheduler, state_pass
from sgl_kimi_k3.cache_adapter import KimiK3Cache
from sgl_kimi_k3.config import Options
from sgl_kimi_k3.pool_adapter import build_pools

if TYPE_CHECKING:
    import numpy as np

TOKEN_BYTES = 32  # SGLang rounds an entry up to this
STATE_WORDS = 61  # float32 words of the temporal state: with the conv part, 8 tokens of KV
EXACT = {"interval": 0, "opportunistic": 0, "check": True}


def publish_args(*, page_size: int = 1, **flags: object) -> None:
    """Fill SGLang's process-wide configuration, which everything below reads."""
    reset_context()
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        attention_backend="torch_native",
        page_size=page_size,
        chunked_prefill_size=64,
        mamba_radix_cache_strategy="no_buffer",
        disable_overlap_schedule=True,
        radix_cache_backend="kimi_k3",
        **flags,
    )
    args._mamba_cache_chunk_size = 64
    publish(args, role="scheduler")


def fold(tokens: list[int] | np.ndarray) -> float:
    """An order-sensitive hash that a float32 holds exactly."""
    value = 1
    for token in tokens:
        value = (value * 31 + int(token) + 7) % 8_388_593
    return float(value)


class World:
    """One scheduler's memory: pools, tree, running requests."""

    def __init__(
        self,
        *,
        tokens: int = 400,
        states: int = 12,
        rows: int = 8,
        chunk: int = 64,
        overlap: bool = False,
        kernel_chunk: int = 0,
        disable: bool = False,
        device: str = "cpu",
        page_size: int = 1,
        **options: int,
    ) -> None:
        publish_args(page_size=page_size)
        self.page_size = page_size
        self.chunk = chunk
        self.overlap = overlap
        self.device = device  # "meta" has no values: nothing is computed and nothing compared
        self._inflight: list[tuple[list[tuple[Req, int]], bool]] = []
        self._unseen: dict[str, list[int]] = {}  # sampled tokens by request, on the device
        params = SimpleNamespace(
            shape=SimpleNamespace(conv=[(3, 2)], temporal=(1, 1, STATE_WORDS), conv_slice_axis=0),
            dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
            layers=[0],
        )
        bundle = build_pools(
            init_unified_mamba_pools,
            device=device,
            kv_cache_dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            page_size=page_size,
            start_layer=0,
            end_layer=2,
            is_draft_worker=False,
            use_mla_backend=True,
            kv_lora_rank=8,
            qk_rope_head_dim=8,
            mamba_layer_ids=[0],
            full_attention_layer_ids=[1],
            mamba2_cache_params=params,
            model_context_len=4096,
            extra_max_context_len=4,
            max_total_num_tokens=tokens,
            max_mamba_cache_size=states,
            max_num_reqs=rows,
            enable_memory_saver=False,
            enable_mamba_extra_buffer=False,
            enable_mamba_extra_buffer_lazy=False,
            speculative_num_draft_tokens=None,
            disable_overlap_schedule=True,
            need_sort=False,
            lazy_compaction=True,
        )
        self.rows = bundle.req_to_token_pool
        self.allocator = bundle.token_to_kv_pool_allocator
        self.arena = self.allocator.arena
        self.temporal = self.rows.mamba_pool.mamba_cache.temporal
        self.kv = bundle.token_to_kv_pool.full_kv_pool.kv_buffer[0]
        self.tree = KimiK3Cache(
            CacheInitParams(
                disable=disable,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                chunked_prefill_size=chunk,
            ),
            Options(**{"grid": max(4, page_size), **EXACT, **options}),
            rule=None,
            kernel_chunk=kernel_chunk,
        )
        self.scheduler = SimpleNamespace(tree_cache=self.tree)
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.chunked: Req | None = None
        self._serial = 0

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
        running = SimpleNamespace(reqs=self.running, batch_size=lambda: len(self.running))
        adder_class = scheduler.prefill_adder_class(lambda _: PrefillAdder, self.scheduler)
        adder = adder_class(
            self.page_size, self.tree, self.allocator, running, 0.5, 4096, self.chunk
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        self.rows.mamba_allocator.alloc_group_begin(len(self.waiting))
        for req in list(self.waiting):
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
                break
        self.rows.mamba_allocator.alloc_group_end()
        admitted = set(map(id, adder.can_run_list))
        self.waiting = [req for req in self.waiting if id(req) not in admitted]
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
        plan = state_pass.current()
        written = []
        if plan is not None and not plan.slots.is_meta:
            written = list(zip(plan.slots.tolist(), plan.ends.tolist(), strict=True))
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
            num_tokens=len(self.running), tree_cache=self.tree
        ):
            if len(self.running) == 1:
                self.abort(self.running[0])
                return None
            self.retract(self.running[-1])
        reqs = list(self.running)
        batch = self._batch(reqs, [req.kv.kv_committed_len for req in reqs])
        batch.req_pool_indices_cpu = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch.req_pool_indices = batch.req_pool_indices_cpu.to(self.device)
        alloc_for_decode(batch, 1)
        for req in reqs:
            self._forward(req, req.kv.kv_committed_len - 1, req.kv.kv_committed_len)
        return [(req, self._sample(req)) for req in reqs], False

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
                num_tokens=len(self.running), tree_cache=self.tree
            )

        batch = SimpleNamespace(
            is_empty=lambda: not self.running,
            check_decode_mem=check_decode_mem,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
        )
        state = SimpleNamespace(
            chunked_req=self.chunked,
            tree_cache=self.tree,
            result_queue=self._inflight,
            _add_request_to_queue=lambda req, **_: self.waiting.append(req),
        )
        with mock.patch.object(
            schedule_batch, "release_req", partial(scheduler.release_retracted, release_req)
        ):
            go_on = scheduler.update_running_batch(lambda *_: True, state, batch)
        self.chunked = state.chunked_req
        return bool(go_on)

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
        if self.device == "meta":
            return
        tokens = self._on_device(req)
        slot = int(self.rows.translate_mamba_indices(req.kv.mamba_pool_idx.view(1)))
        held = self.temporal[0, slot].flatten()
        expected = fold(tokens[:start]) if start else 0.0
        assert held.eq(expected).all(), (req.rid, start, held[:2], expected)
        row = self.rows.req_to_token[req.kv.req_pool_idx, :end]
        where = self.allocator.translate_kv_loc(row)
        stored = self.kv[where[:start], 0, 0].float()
        assert stored.tolist() == [float(t % 128) for t in tokens[:start]], req.rid
        self.kv[where[start:]] = torch.tensor(
            [float(t % 128) for t in tokens[start:end]], dtype=self.kv.dtype
        ).view(-1, 1, 1)
        self.temporal[0, slot] = fold(tokens[:end])

    def _on_device(self, req: Req) -> list[int]:
        """Prompt and every token sampled so far, also those the host has not seen yet."""
        known = [*req.origin_input_ids, *req.output_ids]
        return known + self._unseen.get(req.rid, [])[len(req.output_ids) :]

    def _sample(self, req: Req) -> int:
        length = len(self._on_device(req))
        token = 100 + (length * 7 + int(req.origin_input_ids[0])) % 50
        self._unseen.setdefault(req.rid, list(req.output_ids)).append(token)
        return token

    # -- SGLang's idle invariants, at any time --

    def check(self) -> None:
        """Pool, tree, and conservation of every token and state."""
        assert self.allocator.verify_byte_accounting() == []
        assert self.chunked not in self.running
        owners = [*self.running, *([self.chunked] if self.chunked else [])]
        size = self.page_size
        private = sum(
            -(-req.kv.kv_allocated_len // size) - req.kv.cache_protected_len // size
            for req in owners
            if req.kv.holds_kv
        )
        captures = [one for req in owners for one in getattr(req, "kimi_k3_captures", ())]
        private += sum(one.tail is not None for one in captures)
        cached = self.tree.full_evictable_size() + self.tree.full_protected_size()
        assert self.arena.pool.live_blocks == cached // size + private
        live = sum(req.kv.holds_mamba for req in [*owners, *self.waiting])
        live += len(captures)
        cached_states = self.tree.mamba_evictable_size() + self.tree.mamba_protected_size()
        assert self.arena.pool.live_states == cached_states + live
        for req in owners:
            if req.kv.holds_kv and self.device != "meta":  # the host's copy of the row is the row
                row = self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len]
                known = self.rows.blocks(req.kv.req_pool_idx, 0, -(-len(row) // size))
                assert known.tolist() == (row[::size] // size).tolist()
        if not owners:
            assert self.tree.full_protected_size() == self.tree.mamba_protected_size() == 0
            assert len(self.rows.free_slots) == self.rows.size
