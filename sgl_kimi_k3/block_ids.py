"""Block ids as device tensors, and where those blocks are, without a word to the device.

SGLang takes blocks in every decode step, as a device tensor of ids, and asks at once where the
forward writes.  A copy to the device and a kernel that looks the ids up took 6 % of the host's time
in such a step.  Here both are views: of constants (`Ramp`) where ids run on, as in an arena without
holes; else of what was uploaded ahead (`Ahead`), since the pool takes blocks in a known order.
Either is compared with what the pool granted, so it need not be foreseen right.

SGLang keeps a batch's token ids until its forward is done, and with them, one tensor, what is said
here of places: a view may be dropped while a forward on another stream reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mempool.storage import upload

if TYPE_CHECKING:
    from mempool import IdArray, Pool

# Ids uploaded beyond those that were asked for, 16 steps of 32 requests.  Who asks for more at once
# prefills: the next such grant is long in coming.
AHEAD = 512


class Ramp:
    """The numbers from 0 up, or from `highest` down to 0, on the device; runs of them are views.

    Triton compiles a kernel anew for a pointer that is no multiple of 16 bytes.  So there are two
    copies, one number apart, and a view is of the one in which it begins at such an address.
    """

    def __init__(self, highest: int, device: torch.device, *, falling: bool = False) -> None:
        self._bounds = (
            [(highest + pad, -1, -1) for pad in (0, 1)]
            if falling
            else [(-pad, highest + 1, 1) for pad in (0, 1)]
        )
        self._copies = [self._numbers(bounds, device) for bounds in self._bounds]
        self._addresses = [
            range(copy.data_ptr(), copy.data_ptr() + copy.nbytes, copy.itemsize)
            for copy in self._copies
        ]

    @staticmethod
    def _numbers(bounds: tuple[int, int, int], device: torch.device) -> torch.Tensor:
        return torch.arange(*bounds, dtype=torch.int64, device=device)

    def view(self, start: int, count: int) -> torch.Tensor:
        """The `count` numbers from the one at position `start` on; not to be written to."""
        pad = start % 2
        return self._copies[pad].narrow(0, start + pad, count)

    def start_of(self, view: torch.Tensor) -> int | None:
        """The position at which a view of ours begins; None for any other tensor."""
        address = view.data_ptr()
        for pad, addresses in enumerate(self._addresses):
            if address in addresses and view.is_contiguous():
                return addresses.index(address) - pad
        return None

    def intact(self) -> bool:
        """Whether nobody wrote into the numbers.  Waits for the device."""
        return all(
            torch.equal(copy, self._numbers(bounds, copy.device))
            for copy, bounds in zip(self._copies, self._bounds, strict=True)
        )


class Ahead:
    """Ids in the order in which they will be granted, and where they are, by one upload.

    Both twice, one number apart, for the reason that `Ramp` gives.

    Args:
        ids: int64 [n], the first of them just granted.
        homes: int64 [n], where each block is or will be.
    """

    def __init__(self, ids: IdArray, homes: IdArray, device: torch.device) -> None:
        self.ids = ids
        self._bytes, self._home_bytes = ids.tobytes(), homes.tobytes()
        self._next = 0
        self._width = len(ids) + 1 + (len(ids) + 1) % 2
        packed = np.zeros((2, 2, self._width), dtype=np.int64)
        for row, values in zip(packed, (ids, homes), strict=True):
            row[0, : len(ids)] = row[1, 1 : len(ids) + 1] = values
        self._packed = packed.reshape(-1)
        self._uploaded = upload(self._packed, device)
        start = self._uploaded.data_ptr()
        self._addresses = range(start, start + 2 * self._width * 8, 8)

    def take(self, ids: IdArray) -> torch.Tensor | None:
        """The next ids, if these are they."""
        start, stop = self._next, self._next + len(ids)
        if self._bytes[8 * start : 8 * stop] != ids.tobytes():
            return None
        self._next = stop
        return self._view(0, start, len(ids))

    def start_of(self, view: torch.Tensor) -> int | None:
        """The position at which a view made by `take` begins; None for any other tensor."""
        address = view.data_ptr()
        if address not in self._addresses or not view.is_contiguous():
            return None
        pad, place = divmod(self._addresses.index(address), self._width)
        return place - pad

    def homes(self, start: int, homes: IdArray) -> torch.Tensor | None:
        """Where the blocks from position `start` on are, if that is `homes`, as was uploaded."""
        if self._home_bytes[8 * start : 8 * (start + len(homes))] != homes.tobytes():
            return None
        return self._view(1, start, len(homes))

    def _view(self, row: int, start: int, count: int) -> torch.Tensor:
        pad = start % 2
        return self._uploaded.narrow(0, (2 * row + pad) * self._width + start + pad, count)

    def intact(self) -> bool:
        """Whether nobody wrote into what was uploaded.  Waits for the device."""
        return np.array_equal(self._uploaded.cpu().numpy(), self._packed)


class BlockTensors:
    """Block ids as device tensors: the usual grant copies nothing.

    Blocks are taken in order from the arena's end on, so until something has moved a grant above
    all live blocks is a run, and so are its physical indices, falling.  Holes are filled from that
    end on, so the grants to come are known until blocks are freed or moved below them.

    `ahead`: look ahead, where a block is one token; larger ones are asked for one by one.
    """

    def __init__(self, pool: Pool, device: torch.device, *, ahead: bool = True) -> None:
        table = pool.blocks
        self._pool = pool
        self._homes = table.homes
        self._highest = int(table.homes.max())
        self._ids = Ramp(table.max_id, device)
        self._indices = Ramp(self._highest, device, falling=True)
        self._looks_ahead = ahead
        self._ahead: Ahead | None = None
        self._device = device

    def of(self, ids: IdArray) -> torch.Tensor:
        """The ids just granted as an int64 tensor on the device; not to be written to."""
        foreseeable = self._looks_ahead and 0 < len(ids) <= AHEAD
        if foreseeable and self._ahead is not None:
            found = self._ahead.take(ids)
            if found is not None:
                return found
        if len(ids) and _runs(ids, 1):
            return self._ids.view(int(ids[0]), len(ids))
        if not foreseeable:
            return upload(ids, self._device)
        expected = np.concatenate((ids, self._pool.upcoming_blocks(AHEAD)))
        self._ahead = Ahead(expected, self._homes[expected], self._device)
        found = self._ahead.take(ids)
        assert found is not None, "these are its first"
        return found

    def indices_of(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Where the blocks of a view made by `of` are now, if a view can say it; else None.

        Right for what is enqueued next, as the device's table is; not to be written to.
        """
        count = ids.numel()
        if not count or ids.dim() != 1:
            return None
        start = self._ids.start_of(ids)
        if start is not None:
            homes = self._homes[start : start + count]
            if not _runs(homes, -1):
                return None
            return self._indices.view(self._highest - int(homes[0]), count)
        if self._ahead is None:
            return None
        start = self._ahead.start_of(ids)
        if start is None:
            return None
        return self._ahead.homes(start, self._homes[self._ahead.ids[start : start + count]])

    def intact(self) -> bool:
        """Whether nobody wrote into the tensors handed out.  Waits for the device."""
        ahead = self._ahead is None or self._ahead.intact()
        return ahead and self._ids.intact() and self._indices.intact()


def _runs(values: IdArray, step: int) -> bool:
    """Whether each value is the one before plus `step`.  Bytes: for few, several times as fast."""
    first, count = values.item(0), len(values)
    run = np.arange(first, first + step * count, step, dtype=np.int64)
    return values.tobytes() == run.tobytes()
