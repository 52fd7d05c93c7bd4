"""The arena's bytes: zero, copy and move whole units of one uint8 tensor, on the current stream.

Offsets are int64 throughout, so a unit may start beyond 2**31. Nothing here reads a device value
back: indices are host numpy arrays and travel one way. A `Mover` does the copying: `HostMover` on
the CPU, `mempool.kernels.TritonMover` on CUDA.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy.typing as npt
import torch

from mempool.geometry import Geometry
from mempool.grant import Grant, Move
from mempool.ids import IdArray, Side


class Mover(Protocol):
    """Copies or zeroes rows of one uint8 `[units, unit_bytes]` view, in stream order."""

    def copy(self, sources: IdArray, targets: IdArray) -> None:
        """`rows[targets[k]] = rows[sources[k]]` for every k; no target is a source."""

    def zero(self, indices: IdArray) -> None:
        """`rows[indices] = 0`."""


NewMover = Callable[[torch.Tensor], Mover]


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host array as a tensor on `device`, enqueued on the current stream; nothing waits.

    Through pinned memory, or the copy would wait for the stream. The tensor owns its bytes: the
    host allocator keeps the pinned block until the copy is done.
    """
    host = torch.from_numpy(values.copy())
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class HostMover:
    """Numpy over a CPU tensor's memory: a memcpy per unit, no dispatch per call."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows.numpy()

    def copy(self, sources: IdArray, targets: IdArray) -> None:
        """Gather, then scatter; needs as much scratch as it copies."""
        self._rows[targets] = self._rows.take(sources, axis=0)

    def zero(self, indices: IdArray) -> None:
        """Fill by index."""
        self._rows[indices] = 0


class Storage:
    """Whole-unit operations over the arena.

    Args:
        raw: uint8, one dimension, at least `geometry.total_bytes` long, zero at the start.
        geometry: sizes; both kinds are anchored at byte 0 of `raw`.
        mover: makes what copies one kind's rows; by default the one for `raw`'s device.

    Raises:
        ValueError: `raw` is of another type or too short, or no mover knows its device.
    """

    def __init__(
        self, raw: torch.Tensor, geometry: Geometry, mover: NewMover | None = None
    ) -> None:
        if raw.dtype != torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
            raise ValueError(f"the arena must be flat contiguous uint8, got {raw.dtype}")
        if raw.numel() < geometry.total_bytes:
            raise ValueError(f"{raw.numel()} bytes hold no arena of {geometry.total_bytes}")
        self.raw = raw
        self.geometry = geometry
        new_mover = mover or _default_mover(raw)
        self._rows = {
            Side.STATE: _rows(raw, geometry.total_bytes, geometry.state_bytes),
            Side.BLOCK: _rows(raw, geometry.total_bytes, geometry.block_bytes),
        }
        self._movers = {side: new_mover(rows) for side, rows in self._rows.items()}

    def rows(self, side: Side) -> torch.Tensor:
        """uint8 `[indices, unit_bytes]` view of one kind over the whole arena."""
        return self._rows[side]

    def zero_states(self, indices: IdArray) -> None:
        """Zero states by physical index."""
        if len(indices):
            self._movers[Side.STATE].zero(indices)

    def zero_blocks(self, indices: IdArray) -> None:
        """Zero blocks by physical index."""
        if len(indices):
            self._movers[Side.BLOCK].zero(indices)

    def copy_states(self, sources: IdArray, targets: IdArray) -> None:
        """Copy states pairwise by physical index; no target may be a source.

        Raises:
            ValueError: the arrays differ in length.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
        if len(sources):
            self._movers[Side.STATE].copy(sources, targets)

    def move(self, moves: Iterable[Move]) -> None:
        """Apply moves in order."""
        for move in moves:
            self._movers[move.side].copy(move.sources, move.targets)

    def apply(self, grant: Grant) -> None:
        """Make a grant's units readable: its moves, then zeros where bytes changed owner."""
        self.move(grant.moves)
        self.zero_states(grant.stale_states)
        self.zero_blocks(grant.stale_blocks)


def _rows(raw: torch.Tensor, total_bytes: int, unit_bytes: int) -> torch.Tensor:
    units = total_bytes // unit_bytes
    return raw[: units * unit_bytes].view(units, unit_bytes)


def _default_mover(raw: torch.Tensor) -> NewMover:
    kind = raw.device.type
    if kind == "cpu":
        return HostMover
    if kind == "cuda":
        from mempool.kernels import TritonMover  # noqa: PLC0415 - Triton only where a GPU is

        return TritonMover
    raise ValueError(f"no mover for device {kind!r}: pass one, or use --device cuda or cpu")
