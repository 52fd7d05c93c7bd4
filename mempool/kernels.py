"""Triton mover: whole units copied or zeroed in one launch.

One program handles `CHUNK` words of one unit. Words are 8 bytes wide where the unit's size allows
it, 1 byte otherwise. A unit's word offset is computed in int64, so an arena may exceed 2**31 words.
"""

import torch
import triton
import triton.language as tl

from mempool.ids import IdArray
from mempool.storage import upload

CHUNK = 4096  # words a program: 32 KiB of int64, enough loads in flight for one block of threads
WARPS = 8


# No annotations but Triton's own: its compiler resolves them as globals.
def _copy(words, sources, targets, unit_words, chunks, chunk: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    program = tl.program_id(0).to(tl.int64)
    unit = program // chunks
    at = (program % chunks) * chunk + tl.arange(0, chunk)
    source = tl.load(sources + unit) * unit_words
    target = tl.load(targets + unit) * unit_words
    inside = at < unit_words
    tl.store(words + target + at, tl.load(words + source + at, mask=inside), mask=inside)


def _zero(words, indices, unit_words, chunks, chunk: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    program = tl.program_id(0).to(tl.int64)
    at = (program % chunks) * chunk + tl.arange(0, chunk)
    target = tl.load(indices + program // chunks) * unit_words
    tl.store(words + target + at, 0, mask=at < unit_words)


_copy_kernel = triton.jit(_copy)
_zero_kernel = triton.jit(_zero)


class TritonMover:
    """`mempool.storage.Mover` for CUDA tensors: one launch a call, no scratch."""

    def __init__(self, rows: torch.Tensor) -> None:
        unit_bytes = rows.shape[1]
        wide = unit_bytes % 8 == 0 and rows.data_ptr() % 8 == 0
        self._words = rows.view(-1).view(torch.int64) if wide else rows.view(-1)
        self._unit_words = unit_bytes // 8 if wide else unit_bytes
        self._chunks = triton.cdiv(self._unit_words, CHUNK)

    def copy(self, sources: IdArray, targets: IdArray) -> None:
        """Sources and targets are disjoint, so programs may run in any order."""
        _copy_kernel[(len(sources) * self._chunks,)](
            self._words,
            self._upload(sources),
            self._upload(targets),
            self._unit_words,
            self._chunks,
            chunk=CHUNK,
            num_warps=WARPS,
        )

    def zero(self, indices: IdArray) -> None:
        """Units in any order."""
        _zero_kernel[(len(indices) * self._chunks,)](
            self._words,
            self._upload(indices),
            self._unit_words,
            self._chunks,
            chunk=CHUNK,
            num_warps=WARPS,
        )

    def _upload(self, indices: IdArray) -> torch.Tensor:
        return upload(indices, self._words.device)
