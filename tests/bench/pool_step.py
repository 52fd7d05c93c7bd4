"""What a decode step's allocation costs: `python -m tests.bench.pool_step [--json F]`.

SGLang's own `check_decode_capacity` and `alloc_for_decode`, then the frees of a finished request,
over our allocator with its tree, and over SGLang's own unified allocator with no tree at all, on
CPU tensors in one process, interleaved, in CPU seconds of the one thread.  Needs SGLang 0.5.23.
"""

import argparse
import contextlib
import gc
import json
import sys
from pathlib import Path
from statistics import mean
from time import thread_time
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocation import alloc_for_decode
from sglang.srt.mem_cache.allocator import unified_mamba, unified_sub_pool
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools

from mempool import Geometry
from sgl_kimi_k3.cache_adapter import KimiK3Cache
from sgl_kimi_k3.config import Options
from sgl_kimi_k3.pools import build_pools
from tests.bench.machine import commit, machine
from tests.bench.pool_ops import STATE_BYTES, TOKEN_BYTES
from tests.bench.pool_peer import context, sizes

BATCH, STEPS, ROUNDS = 64, 512, 4
PAGES = (1, 64)


class Side:
    """Sixty-four requests that decode on one of the two allocators."""

    def __init__(self, page: int, build, tree_of) -> None:
        tokens = BATCH * (STEPS + page) * 2
        geometry = Geometry(tokens * TOKEN_BYTES, STATE_BYTES, page * TOKEN_BYTES, page)
        bundle = build(**sizes(geometry) | {"model_context_len": STEPS, "max_num_reqs": BATCH})
        self.rows, self.allocator = bundle.req_to_token_pool, bundle.token_to_kv_pool_allocator
        self.tree = tree_of(self)
        self.step_seconds = self.free_seconds = float("inf")

    def batch(self) -> SimpleNamespace:
        reqs = [SimpleNamespace(kv=ReqKvInfo(), rid=str(i)) for i in range(BATCH)]
        rows = self.rows.alloc_rows(BATCH)
        for req, row in zip(reqs, rows, strict=True):
            req.kv.req_pool_idx = row
        lengths, indices = torch.zeros(BATCH, dtype=torch.int64), torch.tensor(rows)
        return SimpleNamespace(
            reqs=reqs,
            device="cpu",
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            req_pool_indices=indices,
            req_pool_indices_cpu=indices,
        )

    def decode(self) -> SimpleNamespace:
        batch, spent = self.batch(), []
        for _ in range(STEPS):
            start = thread_time()
            assert self.allocator.check_decode_capacity(num_tokens=BATCH, tree_cache=self.tree)
            alloc_for_decode(batch, 1)
            spent.append(thread_time() - start)
            batch.seq_lens += 1
            batch.seq_lens_cpu += 1
        self.step_seconds = min(self.step_seconds, mean(spent))
        return batch

    def finish(self, batch: SimpleNamespace) -> None:
        start = thread_time()
        for req in batch.reqs:
            self.tree.free_kv_row(req.kv, [(0, STEPS)])
        self.free_seconds = min(self.free_seconds, (thread_time() - start) / BATCH)
        self.rows.free_rows([req.kv.req_pool_idx for req in batch.reqs])


class NoTree:
    """Nothing is cached and nothing evicted: what stock's allocator alone costs."""

    def __init__(self, side: Side) -> None:
        self.page_size = side.allocator.page_size
        self.req_to_token_pool, self.token_to_kv_pool_allocator = side.rows, side.allocator

    free_kv_row = BasePrefixCache.free_kv_row

    def supports_prefix_sharing(self) -> bool:
        return True


def our_tree(side: Side) -> KimiK3Cache:
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=side.rows,
        token_to_kv_pool_allocator=side.allocator,
        page_size=side.allocator.page_size,
    )
    return KimiK3Cache(params, Options(), rule=None)


def measure(page: int) -> dict[str, float]:
    """Microseconds of a mean step of the batch and of a finished request, at the best round."""
    context(page)
    ours = Side(page, lambda **kw: build_pools(init_unified_mamba_pools, **kw), our_tree)
    sides = {"ours": ours}
    if page == 1:  # larger pages SGLang allocates with Triton, which needs a GPU
        sides["peer"] = Side(page, init_unified_mamba_pools, NoTree)
    for _ in range(ROUNDS):
        for side in sides.values():
            side.finish(side.decode())
    assert ours.allocator.arena.pool.violations() == []
    assert ours.allocator.arena.pool.live_blocks == 0
    figures = {
        f"{name}_{what}_us": round(1e6 * getattr(side, f"{what}_seconds"), 1)
        for what in ("step", "free")
        for name, side in sides.items()
    }
    return {"page_tokens": page, "batch": BATCH, "request_tokens": STEPS, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    for module in (unified_sub_pool, unified_mamba):  # trace regions: free, in the peer's favour
        module.record_function = lambda _name: contextlib.nullcontext()
    gc.collect()
    gc.freeze()
    with torch.inference_mode():
        figures = [measure(page) for page in PAGES]
    text = json.dumps(
        {
            "pages": figures,
            "command": "python -m tests.bench.pool_step",
            "commit": commit(),
            "machine": machine(),
        },
        indent=2,
    )
    print(text)
    if path:
        path.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
