"""KV rows that lie one in `dcp` on each rank (DCP), brought together before a CPU attends.

SGLang's GPU kernels attend to a rank's own rows and merge by log-sum-exp.  That rounds otherwise
than one rank does; here the rows themselves are gathered, which is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class SpreadRows:
    """Which rows of a batch's requests this rank holds, and how all ranks' make the whole.

    Args:
        ids: each request's token ids in order, int64; that of position p is on rank p % dcp.
    """

    def __init__(self, ids: Sequence[Tensor]) -> None:
        parallel = get_parallel()
        self._ranks, rank = parallel.dcp_size, parallel.dcp_rank
        self._group = parallel.dcp_group
        self._lengths = [len(one) for one in ids]
        self._each = [-(-length // self._ranks) for length in self._lengths]
        # Where a rank has one row less, the sink's stands in for it and is cut off again.
        self.held = torch.cat(
            [
                torch.cat((mine, mine.new_zeros(each - len(mine))))
                for mine, each in zip(
                    (one[rank :: self._ranks] for one in ids), self._each, strict=True
                )
            ]
        )

    def gather(self, rows: Tensor) -> list[Tensor]:
        """This rank's rows, [len(held), D] -> every request's rows in order, [length, D] each."""
        carried = rows.contiguous().view(torch.uint8)  # gloo knows no 8-bit float
        parts = self._group.all_gather(carried, dim=0).view(rows.dtype)
        parts = parts.unflatten(0, (self._ranks, -1))
        whole, start = [], 0
        for length, each in zip(self._lengths, self._each, strict=True):
            whole.append(parts[:, start : start + each].transpose(0, 1).flatten(0, 1)[:length])
            start += each
        return whole
