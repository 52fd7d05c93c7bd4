"""SGLang's request rows, with a host copy of the block ids in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.mem_cache.unified_memory_pool import UnifiedHybridReqToTokenPool

from sgl_kimi_k3.arena import NO_IDS

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req

    from mempool import IdArray
    from sgl_kimi_k3.windows import Windows


MOST_STEPS = 64  # that are only noted


class RequestRows(UnifiedHybridReqToTokenPool):
    """`req_to_token_pool`: rows of token ids on the device, and of block ids on the host.

    What SGLang writes into a row on the device comes from two places only, and the host knows both:
    the path that a new request matched, and the grant of the batch, in the order of its requests.
    So giving blocks back and publishing them never reads a row from the device.

    Nearly all batches are decode steps of the same rows, and nobody asks for their blocks before
    the next checkpoint.  So steps are only noted, and written down together by who asks.
    """

    def __init__(
        self,
        pool: UnifiedHybridReqToTokenPool,
        block_size: int,
        windows: Windows | None = None,
    ) -> None:
        """Take over the rows that SGLang's factory built."""
        vars(self).update(vars(pool))
        self.windows = windows  # of requests that draft
        self.step_tokens = 1 if windows is None else windows.tokens
        self.step_blocks = self.size * -(-self.step_tokens // block_size)  # of a step of all rows
        count, tokens = pool.req_to_token.shape
        self._block_size = block_size
        self._notes_steps = block_size == 1 and windows is None  # a block for each row
        # As large as the device's table at most; pages of it that are never touched cost nothing.
        self._blocks = np.zeros((count, -(-tokens // block_size)), dtype=np.int32)
        self._held = np.zeros(count, dtype=np.int64)  # blocks in each row
        self._granted = NO_IDS  # blocks that are on their way into rows
        # Decode steps not written down: of each a block for every row, in the order of the rows.
        self._steps: list[IdArray] = []
        self._step_rows: torch.Tensor | None = None
        self._step_lengths: torch.Tensor | None = None  # of the rows behind the last step

    def alloc(self, reqs: list[Req]) -> list[int] | None:
        """Rows for requests; a new one starts with the blocks of its `kimi_k3_prefix`."""
        fresh = [req for req in reqs if not req.kv.holds_kv]
        selected: list[int] | None = super().alloc(reqs)
        if selected is not None:
            for req in fresh:
                prefix: IdArray = req.__dict__.pop("kimi_k3_prefix", NO_IDS)
                self._held[req.kv.req_pool_idx] = len(prefix)
                self.put(req.kv.req_pool_idx, 0, prefix)
        return selected

    def granted(self, blocks: IdArray) -> None:
        """Note the blocks that the rows of one batch are about to receive, in its order."""
        self._granted = blocks

    def alloc_aux_to_lengths(
        self, *, req_pool_indices_cpu: torch.Tensor, target_seq_lens_cpu: torch.Tensor
    ) -> None:
        """SGLang calls this once it has written a batch's new token ids into the rows."""
        super().alloc_aux_to_lengths(
            req_pool_indices_cpu=req_pool_indices_cpu, target_seq_lens_cpu=target_seq_lens_cpu
        )
        blocks, self._granted = self._granted, NO_IDS
        if self._notes_steps and len(blocks) == len(req_pool_indices_cpu):
            if req_pool_indices_cpu is not self._step_rows or len(self._steps) == MOST_STEPS:
                self._settle()
            self._steps.append(blocks)
            self._step_rows, self._step_lengths = req_pool_indices_cpu, target_seq_lens_cpu
        else:
            self._settle()
            self._extend(req_pool_indices_cpu.numpy(), target_seq_lens_cpu.numpy(), blocks)

    def _settle(self) -> None:
        """Write down the steps that were only noted."""
        if not self._steps:
            return
        assert self._step_rows is not None
        assert self._step_lengths is not None
        rows, count = self._step_rows.numpy(), len(self._steps)
        held = self._held[rows]
        grown = self._step_lengths.numpy() - held
        assert (grown == count).all(), f"{count} blocks for each of {grown} tokens"
        self._blocks[rows[:, None], held[:, None] + np.arange(count)] = np.stack(self._steps, 1)
        self._held[rows] = held + count
        self._steps, self._step_rows, self._step_lengths = [], None, None

    def _extend(self, rows: IdArray, lengths: IdArray, blocks: IdArray) -> None:
        """Write the blocks of a batch into its rows, which become so many tokens long."""
        if self._block_size > 1:
            lengths = -(-lengths // self._block_size)
        held = self._held[rows]
        assert (lengths - held).sum() == len(blocks), f"{len(blocks)} blocks for {lengths - held}"
        if not len(blocks):
            return
        grows = lengths > held
        if len(blocks) == np.count_nonzero(grows):  # at most one block each
            self._blocks[rows[grows], held[grows]] = blocks
        else:
            start = 0
            for row, low, high in zip(rows.tolist(), held.tolist(), lengths.tolist(), strict=True):
                self._blocks[row, low:high] = blocks[start : start + high - low]
                start += high - low
        self._held[rows] = lengths

    def blocks(self, row: int, start: int, stop: int) -> IdArray:
        """Block ids of a row at block positions [start, stop): int64, the caller's own."""
        self._settle()
        assert stop <= self._held[row], f"row {row} holds {self._held[row]} blocks, not {stop}"
        return self._blocks[row, start:stop].astype(np.int64)

    def block_at(self, row: int, position: int) -> int:
        """The block id in which a token of the row lies."""
        return int(self.blocks(row, *(position // self._block_size + n for n in (0, 1)))[0])

    def put(self, row: int, start: int, blocks: IdArray) -> None:
        """Replace block ids of a row from block position `start`; the device's is the caller's."""
        self._settle()
        stop = start + len(blocks)
        assert stop <= self._held[row], f"row {row} holds {self._held[row]} blocks, not {stop}"
        self._blocks[row, start:stop] = blocks

    def free_rows(self, indices: list[int]) -> None:
        """Rows back to SGLang; they hold nothing any more."""
        self._settle()
        super().free_rows(indices)
        self._held[indices] = 0

    def clear(self) -> None:
        """Free every row and state."""
        super().clear()
        self._steps = []
        self._held[:] = 0
