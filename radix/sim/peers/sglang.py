"""SGLang 0.5.23 itself: its tree, pools, requests and snapshot rules, with no model behind them.

What runs is the installed wheel's code: `UnifiedRadixCache` with its Full and Mamba components
(Rust core where it loads) over its unified pool, `Req`, `alloc_for_extend`, `checkpoint_kv_cache`,
`release_kv_cache`, and the rule of `ScheduleBatch` that decides where a forward leaves its one
state: the chunk's end on a grid of 64, or the branching point instead of it. Strategy
`extra_buffer`, SGLang's choice for Kimi K3: a running request holds one live state and two
tracking ones, and a donated one is replaced at once. While it decodes, a state is tracked every
256 tokens and the last one is donated.

What stands in for the scheduler, each time in SGLang's favour:

- As many requests run as its static cap allows (0.9 / 1.9 of the budget in states, five a
  request).
- A request is admitted if free and evictable KV cover all that it and the running ones will still
  take, states included, or if nothing runs. SGLang's own budget promises more than it can
  allocate, and its scheduler then dies; here a failed allocation cuts one request short.
- A decode is one allocation, not one a token, without retraction.

Pages are one token up to 1 M tokens of budget and 64 beyond it, where SGLang's allocator needs 45
ms for each free at one token a page; hits differ by about 0.1 points.
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_extend
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.sampling.sampling_params import SamplingParams

from radix.sim.peers.sglang_arena import CHUNK_TOKENS, Arena, build

if TYPE_CHECKING:
    from radix.sim.server import Setup
    from radix.sim.trace import Request

FULL_MEMORY_RATIO = 0.9  # SGLang's default, and its states reserved per running request
STATES_RESERVED = 5
STATES_TAKEN = 4  # live, two tracking, and one to replace a donated one
STATES_PER_PATH = 3  # what its pull request 31230 measured on agents
SMALL_TOKENS, LARGE_PAGE = 1_000_000, 64


class Sglang:
    """One scheduler's memory. SGLang's configuration is process-wide: one instance at a time."""

    name = "sglang"

    def __init__(self, setup: Setup, states_per_path: int = -1) -> None:
        model = setup.model
        torch.set_num_threads(1)
        total_tokens = setup.capacity_bytes // model.token_bytes
        state_tokens = -(-model.state_bytes // model.token_bytes)
        share = FULL_MEMORY_RATIO / (1 + FULL_MEMORY_RATIO)
        self.cap = int(total_tokens / state_tokens * share) // STATES_RESERVED
        requests = setup.trace.requests
        self.arena: Arena = build(
            total_tokens=total_tokens,
            state_tokens=state_tokens,
            page_size=1 if total_tokens <= SMALL_TOKENS else LARGE_PAGE,
            rows=max(1, min(self.cap, len(requests))),
            context_tokens=max(r.prompt_len + r.output_len for r in requests),
            states_per_path=states_per_path,
        )
        self._states_per_path = states_per_path
        self.tree = self.arena.tree
        self._running: dict[Request, Req] = {}
        self._failed: set[Request] = set()
        self._counters = {"taken_states": 0, "failed_allocations": 0, "refused_at_cap": 0}

    # -- the server -------------------------------------------------------------------------

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def begin(self, request: Request) -> int | None:
        """Match and lock as admission does, if there will be room."""
        if len(self._running) >= self.cap:
            self._counters["refused_at_cap"] += 1
            return None
        if self._states_to_spare() < STATES_TAKEN:
            return None
        tokens = request.tokens()[: request.prompt_len]
        req = Req(
            str(request.number),
            "",
            array("q", tokens.tobytes()),
            SamplingParams(max_new_tokens=max(request.output_len, 1)),
        )
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        hit = int(req.prefix_len)
        if self._running and self._spare_tokens() < self._cost(hit, request):
            release_kv_cache(req, self.tree, checkpoint=False)
            self.tree.unlock(req.lock)
            return None
        self._running[request] = req
        return hit

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def extend(self, request: Request, up_to: int) -> bool:
        """Allocate as a forward does, then publish as the processing of its result does."""
        req = self._running[request]
        try:
            if up_to <= request.prompt_len:
                self._prefill(req, up_to, ends=up_to == request.computed_len)
            else:
                self._decode(req, up_to)
        except (RuntimeError, AssertionError):  # where SGLang's scheduler dies
            self._counters["failed_allocations"] += 1
            self._failed.add(request)
            return False
        return True

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def finish(self, request: Request) -> None:
        """The tree takes what it can name; the rest goes back."""
        req = self._running.pop(request)
        if request in self._failed:
            self._failed.remove(request)
            self._abandon(req)
            return
        answer = request.tokens()[request.prompt_len :]
        req.output_ids.extend(array("q", answer.tobytes()))
        req.finished_reason = FINISH_LENGTH(length=len(answer))
        self._release(req, checkpoint=True)

    def counters(self) -> dict[str, int]:
        """States and tokens held, and what did not go as planned."""
        return self._counters | {
            "states": self.tree.mamba_evictable_size() + self.tree.mamba_protected_size(),
            "blocks": (self.tree.full_evictable_size() + self.tree.full_protected_size())
            // self.arena.page_size,
        }

    def violations(self) -> list[str]:
        """SGLang's own idle invariants, when nothing runs."""
        found = list(self.arena.allocator.verify_byte_accounting())
        tokens = (
            self.arena.allocator.available_size()
            + self.tree.full_evictable_size()
            + self.tree.full_protected_size()
        )
        if tokens != self.arena.allocator.size:
            found.append(f"{tokens} of {self.arena.allocator.size} tokens are accounted for")
        if len(self.arena.rows.free_slots) != self.arena.rows.size:
            found.append(f"{len(self.arena.rows.free_slots)} of {self.arena.rows.size} rows free")
        return found

    # -- what SGLang's scheduler does -------------------------------------------------------

    def _states_to_spare(self) -> int:
        free = self.arena.rows.mamba_allocator.schedulable_available_size()
        return int(free + self.tree.mamba_evictable_size())

    def _spare_tokens(self) -> int:
        """Tokens of KV that fit beside what the running will still take."""
        promised = sum(self._cost(req.prefix_len, r) for r, req in self._running.items())
        free = self.arena.allocator.available_size() + self.tree.full_evictable_size()
        return int(free - promised)

    def _cost(self, start: int, request: Request) -> int:
        """Tokens of KV a request at depth `start` may still take; its chunks leave states."""
        chunks = max(0, -(-(request.prompt_len - start) // CHUNK_TOKENS))
        left = chunks if self._states_per_path < 0 else min(chunks, self._states_per_path)
        states = left + (STATES_TAKEN if chunks else 0)
        return request.computed_len - start + states * self.arena.state_tokens

    def _allocate(self, req: Req, end: int) -> SimpleNamespace:
        """A row, states where it has none, KV for [prefix_len, end); the batch, as far as read."""
        start = req.prefix_len
        req.extend_end = end
        batch = SimpleNamespace(
            reqs=[req],
            device="cpu",
            tree_cache=self.tree,
            req_to_token_pool=self.arena.rows,
            token_to_kv_pool_allocator=self.arena.allocator,
            hisparse_coordinator=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(), is_encoder_decoder=False
            ),
            prefix_lens=[start],
            extend_lens=[end - start],
            extend_num_tokens=end - start,
            seq_lens=torch.tensor([end]),
            seq_lens_cpu=torch.tensor([end]),
        )
        alloc_for_extend(batch)
        return batch

    def _prefill(self, req: Req, end: int, *, ends: bool) -> None:
        batch = self._allocate(req, end)
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)  # noqa: SLF001
        ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, [req])  # noqa: SLF001
        if ends:
            return  # a request that ends with its prefill is published at its release
        self._counters["taken_states"] += req.kv.mamba_last_track_seqlen is not None
        self.arena.allocator.free_group_begin()
        checkpoint_kv_cache(req, self.tree)
        self.arena.allocator.free_group_end()
        req.init_next_round_input()

    def _decode(self, req: Req, end: int) -> None:
        start = req.prefix_len
        self._allocate(req, end)
        grid = mamba_track_grid(self.arena.page_size)
        for depth in range(start - start % grid + grid, end + 1, grid):
            kv = req.kv
            kv.mamba_last_track_idx = kv.mamba_next_track_idx
            kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
            kv.mamba_last_track_seqlen = depth
            kv.mamba_next_track_idx = self.arena.rows.get_mamba_ping_pong_other_idx(
                kv.mamba_next_track_idx
            )
        req.prefix_len = end

    def _release(self, req: Req, *, checkpoint: bool) -> None:
        self.arena.allocator.free_group_begin()
        release_kv_cache(req, self.tree, checkpoint=checkpoint)
        self.arena.allocator.free_group_end()

    def _abandon(self, req: Req) -> None:
        """Give back what a request holds after a failed allocation, half of one included."""
        if req.kv.kv_allocated_len:
            self._release(req, checkpoint=False)
            return
        if req.kv.mamba_ping_pong_track_buffer is not None:
            self.arena.rows.free_mamba_cache(req)
        elif req.kv.holds_mamba:
            self.arena.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
        self.tree.unlock(req.lock)
        if req.kv.holds_kv:
            self.arena.rows.free(req)


def make(setup: Setup) -> Sglang:
    """SGLang with its defaults.

    Raises:
        ValueError: SGLang would not start with so little memory.
    """
    return _build(setup, -1)


def make_capped(setup: Setup) -> Sglang:
    """SGLang with `--mamba-max-states-per-path 3`, its remedy for long prompts; else as `make`."""
    return _build(setup, STATES_PER_PATH)


def _build(setup: Setup, states_per_path: int) -> Sglang:
    try:
        return Sglang(setup, states_per_path)
    except RuntimeError as error:
        raise ValueError(
            f"--capacity {setup.capacity_bytes}: SGLang does not start: {error}"
        ) from None
