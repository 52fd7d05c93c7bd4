"""DCP at launch, and its two seams with SGLang: the allocator's face and prefixes on a GPU."""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools
from sglang.srt.model_executor import forward_context
from sglang.srt.runtime_context import get_parallel, override_platform

from mempool import Geometry
from sgl_kimi_k3 import context_parallel
from sgl_kimi_k3.pools import build_pools
from tests.bench.pool_ops import STATE_BYTES, TOKEN_BYTES
from tests.bench.pool_peer import context, sizes
from tests.interpreter import said_by
from tests.plugin.test_cli import View
from tests.plugin.test_life import prompt
from tests.plugin.world import World

K3, TEXT, LINEAR = (
    "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "KimiLinearForCausalLM",
)


def view(**fields: object) -> View:
    """Two GPUs that share one KV cache, but for `fields`."""
    made = View()
    made.device, made.tp_size, made.dcp_size = "cuda", 2, 2
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@contextmanager
def gpu(sm: int):
    with override_platform(is_sm100=sm == 100, device_sm=sm):
        yield


# -- arguments --


@pytest.mark.parametrize("name", [TEXT, LINEAR])
def test_a_kernel_that_can_is_chosen_or_kept(name):
    with gpu(90):
        assert context_parallel.check(view(), [name]) == {"attention_backend": "flashinfer"}
        for backend in ("flashinfer", "trtllm_mla"):
            assert context_parallel.check(view(attention_backend=backend), [name]) == {}
        assert context_parallel.check(view(dcp_size=1, attention_backend="triton"), [name]) == {}


def test_k3_is_left_to_sglang_on_a_blackwell():
    with gpu(100):
        assert context_parallel.check(view(), [K3]) == {}
        chosen = view(decode_attention_backend="cutedsl_mla")
        assert context_parallel.check(chosen, [K3]) == {}


def test_a_cpu_gathers_rows_by_itself():
    assert context_parallel.check(view(device="cpu"), [TEXT]) == {}


@pytest.mark.parametrize(
    ("fields", "name", "sm", "told"),
    [
        ({"attention_backend": "triton"}, LINEAR, 90,
         ("--attention-backend triton", "--dcp-size 2", "Use --attention-backend flashinfer")),
        ({"prefill_attention_backend": "fa3", "attention_backend": "flashinfer"}, LINEAR, 90,
         ("--attention-backend fa3", "Use --attention-backend flashinfer")),
        ({}, K3, 90, ("--dcp-size 2", "Blackwell", "SM90", "Drop --dcp-size", "--attn-dp-size")),
        ({"attention_backend": "flashinfer"}, K3, 100,
         ("--attention-backend flashinfer", "Use --decode-attention-backend cutedsl_mla")),
        ({"tp_size": 8, "dcp_size": 3}, LINEAR, 90,
         ("--dcp-size 3", "8 rank(s)", "--tp-size 8", "Use --dcp-size 2 or 4 or 8")),
        ({"tp_size": 4, "attn_dp_size": 2, "dcp_size": 4}, TEXT, 90,
         ("--dcp-size 4", "2 rank(s)", "--tp-size 4 over --attn-dp-size 2", "Use --dcp-size 2")),
        ({"tp_size": 1}, TEXT, 90, ("--dcp-size 2", "1 rank(s)", "Drop --dcp-size")),
    ],
)  # fmt: skip
def test_what_cannot_spread_its_rows_is_refused(fields, name, sm, told):
    with gpu(sm), pytest.raises(ValueError, match="--dcp-size") as caught:
        context_parallel.check(view(**fields), [name])
    assert all(part in str(caught.value) for part in told), caught.value


@pytest.mark.parametrize(
    ("page_size", "grid", "dcp", "told"),
    [
        (64, 64, 1, None),
        (1, 64, 1, None),
        (1, 64, 8, None),
        (64, 512, 8, None),
        (128, 64, 1, "--page-size 128 does not divide"),
        (64, 64, 8, "--page-size 64 over --dcp-size 8 is 512 tokens"),
    ],
)
def test_the_grid_is_made_of_whole_pages_of_all_ranks(page_size, grid, dcp, told):
    if told is None:
        context_parallel.check_page_size(page_size, grid, dcp)
        return
    with pytest.raises(ValueError, match=told) as caught:
        context_parallel.check_page_size(page_size, grid, dcp)
    assert f"KIMI_K3_GRID={page_size * dcp}." in str(caught.value)


def test_no_page_size_fits_a_grid_smaller_than_its_ranks():
    with pytest.raises(ValueError, match=r"page ends\. Set KIMI_K3_GRID=512"):
        context_parallel.check_page_size(64, 4, 8)


@pytest.mark.parametrize(
    ("fields", "grid", "told"),
    [
        ({"page_size": 64, "dcp_size": 8, "chunked_prefill_size": 16384}, "512", None),
        ({"page_size": 1, "dcp_size": 2, "chunked_prefill_size": None}, "64", None),
        ({"page_size": 1, "dcp_size": 2, "chunked_prefill_size": -1}, "64", None),
        ({"page_size": 64, "dcp_size": 8, "chunked_prefill_size": 256}, "512",
         ("--chunked-prefill-size leaves 256", "pages of 512", "such as 512 a replica")),
        ({"page_size": 1, "dcp_size": 2, "chunked_prefill_size": 8191}, "64",
         ("8191", "pages of 2", "such as 8192 a replica")),
        # SGLang takes pages of 64 for these kernels, unless 32 is asked for.
        ({"page_size": 64, "dcp_size": 2, "chunked_prefill_size": 8192,
          "decode_attention_backend": "cutedsl_mla"}, "64",
         ("--page-size 64 over --dcp-size 2 is 128", "Use --page-size 32, or set", "GRID=128")),
    ],
)  # fmt: skip
def test_resolved_sizes_are_made_of_pages_of_all_ranks(fields, grid, told, monkeypatch):
    monkeypatch.setenv("KIMI_K3_GRID", grid)
    if told is None:
        context_parallel.check_sizes(view(**fields))
        return
    with pytest.raises(ValueError, match="page") as caught:
        context_parallel.check_sizes(view(**fields))
    assert all(part in str(caught.value) for part in told), caught.value


# -- the allocator's face, beside SGLang's own --


def pools(page: int, dcp: int, rank: int) -> tuple[object, object]:
    """Ours and SGLang's, over arenas of the same bytes."""
    context(page)
    get_parallel().override_permanently(attn_dcp_size=dcp, attn_dcp_rank=rank)
    geometry = Geometry(64 * STATE_BYTES, STATE_BYTES, page * TOKEN_BYTES, page)
    theirs = init_unified_mamba_pools(**sizes(geometry)).token_to_kv_pool_allocator
    ours = build_pools(init_unified_mamba_pools, **sizes(geometry)).token_to_kv_pool_allocator
    return ours, theirs


@pytest.mark.parametrize(("dcp", "page"), [(2, 1), (4, 1), (2, 16)])
def test_allocators_answer_as_sglangs_under_dcp(dcp, page):
    """Sequences of odd lengths come and go; each token's row is on one rank, and only there."""
    rng = random.Random(dcp * 100 + page)
    lengths = [rng.randrange(1, 200) for _ in range(12)]
    held = []
    for rank in range(dcp):
        both = pools(page, dcp, rank)
        live = []
        for length in lengths:
            ours, theirs = both
            assert ours.page_size == theirs.page_size == page * dcp
            assert ours.available_size() == theirs.available_size()
            assert ours.size == theirs.size
            live.append([sequence(pool, length) for pool in both])
            if len(live) > 3:
                for pool, ids in zip(both, live.pop(1), strict=True):
                    pool.free_segment(ids, start_pos=0)
            for pool, ids in zip(both, live[-1], strict=True):
                where, mine = pool.translate_write_loc(ids), ids % dcp == rank
                assert where.equal(torch.where(mine, pool.translate_kv_loc(ids // dcp), 0))
                held.append(len(set(where[mine].tolist())))
            offsets = [ids % ours.page_size for ids in live[-1]]
            assert offsets[0].equal(offsets[1])
        cost = [pool.mamba_slot_full_token_cost() for pool in both]
        assert cost[0] == cost[1] == STATE_BYTES // TOKEN_BYTES * dcp
    assert sum(held) == 2 * sum(lengths)


def sequence(pool, length: int) -> torch.Tensor:
    """Token ids of a new sequence, in order; the last page may be filled in part."""
    return pool.alloc(-(-length // pool.page_size) * pool.page_size)[:length]


# -- prefixes that end inside a page of all ranks, on a GPU --


class LaysEndToEnd:
    """SGLang's Triton kernel `create_chunked_prefix_cache_kv_indices`, spelled out."""

    def __getitem__(self, _grid):
        def launch(table, requests, starts, lengths, behind, out, _stride):
            for row, start, length, at in zip(
                *(values.tolist() for values in (requests, starts, lengths, behind)), strict=True
            ):
                out[at : at + length] = table[row, start : start + length]

        return launch


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("lengths", [[9, 6, 3], [7, 0, 5, 11], [1, 1]])
def test_a_rank_reads_its_own_rows_of_prefixes_of_any_length(rank, lengths, monkeypatch):
    dcp = 3
    table = torch.arange(100 * len(lengths), dtype=torch.int32).view(len(lengths), 100)
    table += torch.arange(len(lengths))[:, None] * 20  # every row starts at a whole page
    assert (table[:, 0] % dcp == 0).all()
    batch = {
        "extend_prefix_lens": torch.tensor(lengths, dtype=torch.int32),
        "extend_prefix_lens_cpu": lengths,
        "req_pool_indices": torch.arange(len(lengths)),
        "req_to_token": table,
        "create_chunked_prefix_cache_kv_indices_fn": LaysEndToEnd(),
    }
    translator = SimpleNamespace(translate_dcp_read_ids=lambda ids: ids // dcp)
    monkeypatch.setattr(
        forward_context, "get_attn_backend", lambda: SimpleNamespace(kv_index_translator=translator)
    )
    right = [
        int(table[row, position]) // dcp
        for row, length in enumerate(lengths)
        for position in range(length)
        if position % dcp == rank
    ]
    laid = torch.cat([table[row, :length] for row, length in enumerate(lengths)])
    stock = SimpleNamespace(dcp_local_prefix_kv_indices=laid[rank::dcp] // dcp)
    if all(length % dcp == 0 for length in lengths):  # what stock takes for granted
        assert stock.dcp_local_prefix_kv_indices.tolist() == right

    with get_parallel().override(dcp_size=dcp, dcp_rank=rank, dcp_enabled=True):
        found = context_parallel.prefix_metadata(lambda **_: stock, **batch)
    assert found.dcp_local_prefix_kv_indices.tolist() == right


def test_gpu_ranks_read_their_own_rows_wherever_they_moved():
    """SGLang's own metadata for FlashInfer, its kernels interpreted."""
    assert said_by("tests.plugin.interpret_spread_rows") == ["decode", "prefill"]


@pytest.mark.parametrize("seed", range(8))
def test_admission_counts_blocks_of_all_ranks(seed: int) -> None:
    """Turns of six users in arenas that hold two or three of them: what is admitted fits."""
    for arena in (80, 160):
        rng = random.Random(seed)
        world = World(
            dcp=4, page_size=16, tokens=arena, states=8, rows=8, overlap=True,
            chunk=4096, kernel_chunk=4,
        )  # fmt: skip
        history = [prompt(user, rng.randrange(5, 40)) for user in range(1, 7)]
        for _ in range(4):
            requests = [world.request(tokens, new=rng.randrange(1, 6)) for tokens in history]
            world.run(*requests)
            history = [
                [*req.origin_input_ids, *req.output_ids, *prompt(7, rng.randrange(1, 30))]
                for req in requests
            ]
