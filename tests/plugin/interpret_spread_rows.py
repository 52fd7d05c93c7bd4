"""Which rows SGLang's CUDA path of DCP reads through our allocator; needs TRITON_INTERPRET=1.

Two ranks, one after the other in this process.  Decode: FlashInfer's MLA metadata, written into
the buffer of a captured graph.  Prefill: what each rank sends of cached prefixes, brought together.
"""

import random
import warnings
from types import SimpleNamespace

import torch
from sglang.kernels.ops.attention.kv_indices import create_chunked_prefix_cache_kv_indices
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAIndicesUpdaterDecode
from sglang.srt.layers.dcp import planner
from sglang.srt.layers.dcp.comm import all_gather_kv_cache_for_dcp
from sglang.srt.layers.dcp.layout import get_dcp_lens
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor import forward_context
from sglang.srt.runtime_context import get_parallel

from sgl_kimi_k3 import context_parallel
from tests.plugin.test_context_parallel import pools, sequence

RANKS = 2


class Rank:
    """One rank's pool after blocks moved, its rows of ids, and what it wrote for them.

    Args:
        page: rows of one rank's page.
        rank: which.
        lengths: tokens of each sequence; that of row r stands for `1000 * r + position`.
    """

    def __init__(self, page: int, rank: int, lengths: list[int]) -> None:
        self.pool, _ = pools(page, RANKS, rank)
        self.lengths, self.rank = lengths, rank
        rng = random.Random(page)
        self.table = torch.zeros((len(lengths) + 1, 256), dtype=torch.int32)
        between = []
        for row, length in enumerate(lengths, start=1):
            between.append(sequence(self.pool, rng.randrange(1, 50)))
            self.table[row, :length] = sequence(self.pool, length)
        for ids in between:
            self.pool.free_segment(ids, start_pos=0)
        assert self.pool.flush_opportunistic() > 0
        self.requests = torch.arange(1, len(lengths) + 1)
        self.translator = KVIndexTranslator(
            req_to_token=self.table,
            token_to_kv_pool_allocator=self.pool,
            token_to_kv_pool=self.pool.get_kvcache(),
            page_size=page,
            device="cpu",
        )
        geometry = self.pool.arena.geometry  # rows are numbered from the arena's first byte
        self.memory = torch.full((geometry.total_bytes // geometry.block_bytes * page,), -1.0)
        for row, length in enumerate(lengths, start=1):
            where = self.pool.translate_write_loc(self.table[row, :length].long())
            self.memory[where] = 1000.0 * row + torch.arange(length)
        self.memory[0] = -1.0  # the sink, where SGLang's kernels write nothing

    def decode(self) -> torch.Tensor:
        """What the kernel of a replayed graph reads, one request behind the other."""
        own = get_dcp_lens(torch.tensor(self.lengths, dtype=torch.int32), RANKS, self.rank)
        updater = FlashInferMLAIndicesUpdaterDecode.__new__(FlashInferMLAIndicesUpdaterDecode)
        updater.attn_backend = SimpleNamespace(kv_index_translator=self.translator)
        updater.scaling, updater.data_type = 1.0, torch.bfloat16
        updater.num_local_heads, updater.kv_lora_rank, updater.qk_rope_head_dim = 16, 512, 64
        buffer = torch.full((1024,), -1, dtype=torch.int32)
        planned = []
        updater.call_begin_forward(
            SimpleNamespace(plan=lambda *told: planned.append(told)),
            torch.tensor(self.lengths),
            sum(self.lengths),
            torch.arange(len(self.lengths) + 1, dtype=torch.int32),
            torch.zeros(len(self.lengths) + 1, dtype=torch.int32),
            init_metadata_replay=True,
            plan=SimpleNamespace(),
            req_pool_indices=self.requests,
            qo_indptr_cpu=None,
            kv_indptr_cpu=None,
            kv_indices=buffer,
            kv_len_arr_cpu=own,
        )
        assert planned[0][2] is buffer
        return self.memory[buffer[: int(own.sum())].long()]

    def prefixes(self, prefixes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Its rows of all prefixes, and where each sequence lies once they are brought together."""
        for module in (planner, forward_context):
            module.get_attn_backend = lambda: SimpleNamespace(kv_index_translator=self.translator)
        extends = torch.tensor(self.lengths) - torch.tensor(prefixes)
        metadata = context_parallel.prefix_metadata(
            planner.prepare_decode_context_parallel_metadata,
            seq_lens=torch.tensor(self.lengths),
            extend_prefix_lens=torch.tensor(prefixes),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens=extends,
            req_pool_indices=self.requests,
            req_to_token=self.table,
            seq_lens_sum=sum(self.lengths),
            kv_buffer_shape=torch.Size([1, 1, 1]),
            kv_cache_dtype=torch.float32,
            kv_cache_device="cpu",
            create_chunked_prefix_cache_kv_indices_fn=create_chunked_prefix_cache_kv_indices,
        )
        return self.memory[metadata.dcp_local_prefix_kv_indices], metadata.dcp_kv_indices


def on(rank: int, group: object = None) -> object:
    return get_parallel().override(dcp_size=RANKS, dcp_rank=rank, dcp_enabled=True, dcp_group=group)


def told(lengths: list[int], start: int = 0, step: int = 1) -> torch.Tensor:
    """What stands for every `step`-th token of all sequences, from `start` on."""
    return torch.cat(
        [1000.0 * row + torch.arange(start, n, step) for row, n in enumerate(lengths, start=1)]
    )


def decode(page: int) -> None:
    """Lengths of 1 are padding: the second rank has no row of them at all."""
    lengths = [89, 2, 33, 64, 17, 1, 1]
    for rank in range(RANKS):
        with on(rank):
            assert Rank(page, rank, lengths).decode().equal(told(lengths, rank, RANKS))


def prefill(page: int, prefixes: list[int]) -> None:
    """Prefixes of odd lengths among others, and one request that has none."""
    lengths = [prefix + 5 + at for at, prefix in enumerate(prefixes)]
    rows = []
    for rank in range(RANKS):
        with on(rank):
            held, places = Rank(page, rank, lengths).prefixes(prefixes)
            rows.append(held[:, None, None])
    sent: list[torch.Tensor] = []

    class Group:
        """Gathers nothing at first: each rank's turn to send comes once."""

        def all_gather_into_tensor(self, out, mine):
            if len(sent) < RANKS:
                sent.append(mine.clone())
            else:
                out.copy_(torch.cat(sent))

    for rank in (*range(RANKS), 0):
        with on(rank, Group()):
            latent, rope = rows[rank], rows[rank][..., :0]
            whole = all_gather_kv_cache_for_dcp(latent, rope, torch.tensor(prefixes))
    new = [1000.0 * (at + 1) + torch.arange(p, lengths[at]) for at, p in enumerate(prefixes)]
    assert torch.cat((whole.flatten(), *new))[places.long()].equal(told(lengths))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for page in (1, 16):
        decode(page)
    print("decode")
    for page in (1, 16):
        for prefixes in ([9, 6, 3], [7, 0, 5, 11], [1, 1], [64]):
            prefill(page, prefixes)
    print("prefill")
