"""Triton mover: whole units copied or zeroed in one launch, without scratch.

One program handles `CHUNK` words of one unit. Words are 8 bytes wide where the unit's size allows
it, 1 byte otherwise. A unit's word offset is computed in int64, so an arena may exceed 2**31 words.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mempool.ids import IdArray

CHUNK = 4096  # words a program: 32 KiB of int64, enough loads in flight for one block of threads
WARPS = 8


def _copy(
    words: Any, sources: Any, targets: Any, unit_words: Any, chunks: Any, chunk: tl.constexpr
) -> None:
    program = tl.program_id(0).to(tl.int64)
    unit = program // chunks
    at = (program % chunks) * chunk + tl.arange(0, chunk)
    source = tl.load(sources + unit) * unit_words
    target = tl.load(targets + unit) * unit_words
    inside = at < unit_words
    tl.store(words + target + at, tl.load(words + source + at, mask=inside), mask=inside)


def _zero(words: Any, indices: Any, unit_words: Any, chunks: Any, chunk: tl.constexpr) -> None:
    program = tl.program_id(0).to(tl.int64)
    at = (program % chunks) * chunk + tl.arange(0, chunk)
    target = tl.load(indices + program // chunks) * unit_words
    tl.store(words + target + at, 0, mask=at < unit_words)


_copy_kernel = triton.jit(_copy)
_zero_kernel = triton.jit(_zero)


class TritonMover:
    """`mempool.storage.Mover` for CUDA tensors."""

    def copy(self, rows: torch.Tensor, sources: IdArray, targets: IdArray) -> None:
        """One launch; sources and targets are disjoint, so programs may run in any order."""
        words, unit_words = _words(rows)
        chunks = triton.cdiv(unit_words, CHUNK)
        _copy_kernel[(len(sources) * chunks,)](
            words,
            _upload(sources, rows.device),
            _upload(targets, rows.device),
            unit_words,
            chunks,
            chunk=CHUNK,
            num_warps=WARPS,
        )

    def zero(self, rows: torch.Tensor, indices: IdArray) -> None:
        """One launch."""
        words, unit_words = _words(rows)
        chunks = triton.cdiv(unit_words, CHUNK)
        _zero_kernel[(len(indices) * chunks,)](
            words,
            _upload(indices, rows.device),
            unit_words,
            chunks,
            chunk=CHUNK,
            num_warps=WARPS,
        )


def _words(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The rows as their widest words, and words per row."""
    flat = rows.view(-1)
    if rows.shape[1] % 8 == 0 and rows.data_ptr() % 8 == 0:
        return flat.view(torch.int64), rows.shape[1] // 8
    return flat, rows.shape[1]


def _upload(indices: IdArray, device: torch.device) -> torch.Tensor:
    """Host indices as an int64 tensor on `device`, without waiting for it.

    Pinned, or the copy would wait; the host allocator keeps the block until the copy is done.
    """
    host = torch.from_numpy(indices.copy())
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
