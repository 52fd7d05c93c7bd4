"""The pool, its bytes and its device tables as one object: the only place where ids meet memory.

`mempool.Pool` decides, this applies: moves first, in order, then zero fills, then the tables that
SGLang's kernels translate with.  Everything runs on the stream of the forward passes, where SGLang
also translates ids: whatever is in flight has read what it needs, and the next forward sees all of
it.  So nothing waits, and bytes may change owner while a forward that used them is still running.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from mempool import Geometry, Move, Pool, Side
from mempool.storage import Storage, upload
from sgl_kimi_k3.block_ids import BlockTensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool import Grant, IdArray, Table
    from sgl_kimi_k3.decisions import DecisionLog

NO_IDS: IdArray = np.empty(0, dtype=np.int64)


class DeviceTable:
    """A torch copy of one `mempool.Table` (virtual id -> physical index, int64 [max id + 1]).

    On the CPU it shares the table's memory; on a GPU entries that moves have changed are copied.
    """

    def __init__(self, table: Table, device: torch.device) -> None:
        self._table = table
        self._shared = device.type == "cpu"
        host = torch.from_numpy(table.homes)
        self.tensor = host if self._shared else host.to(device)

    def refresh(self, ids: IdArray) -> None:
        """Make the entries of `ids` visible on the device."""
        if not self._shared and ids.size:
            entries = np.stack((ids, self._table.homes[ids]))
            where, indices = upload(entries, self.tensor.device)
            self.tensor[where] = indices


class SlotTensors:
    """Every state id as an element of one constant device tensor.

    SGLang keeps a request's state id as a device tensor.  Ours is a view of this constant, so
    handing an id out copies nothing to the device, and taking it back reads nothing from it: the
    id is the view's offset.
    """

    def __init__(self, max_id: int, device: torch.device) -> None:
        self._all = torch.arange(max_id + 1, dtype=torch.int64, device=device)
        self._storage = self._all.untyped_storage()  # kept: it is the address that is compared

    def intact(self) -> bool:
        """Whether nobody wrote into the constant.  Waits for the device."""
        return torch.equal(self._all, torch.arange(len(self._all), device=self._all.device))

    def of(self, slot: int) -> torch.Tensor:
        """The id as an int64 tensor [1] on the device."""
        return self._all[slot : slot + 1]

    def read(self, ids: torch.Tensor) -> IdArray:
        """The ids in a tensor on the host; only a tensor that is no view of ours is waited for."""
        if ids.numel() == 1 and ids.untyped_storage().data_ptr() == self._storage.data_ptr():
            return np.array([ids.storage_offset()], dtype=np.int64)
        return ids.detach().to("cpu", torch.int64).flatten().numpy()

    def read_one(self, slot: torch.Tensor) -> int:
        """The id in a tensor of one element."""
        return int(self.read(slot)[0])


class Arena:
    """One byte arena with its policy.  Satisfies `radix.PoolPort`.

    Args:
        raw: uint8 tensor [geometry.total_bytes] that SGLang's views are cut from.
        geometry: sizes in bytes; physical indices are anchored at byte 0 as in SGLang's views.
        stream: where forward passes run; None where there is no such thing.
    """

    def __init__(
        self, raw: torch.Tensor, geometry: Geometry, stream: torch.cuda.Stream | None = None
    ) -> None:
        self.geometry = geometry
        self.stream = stream
        self.pool = Pool(geometry)
        self.storage = Storage(raw, geometry)
        self.states = DeviceTable(self.pool.states, raw.device)
        self.blocks = DeviceTable(self.pool.blocks, raw.device)
        self.slots = SlotTensors(self.pool.states.max_id, raw.device)
        self.block_ids = BlockTensors(self.pool, raw.device, ahead=geometry.block_size == 1)
        self.device = raw.device
        self.decisions: DecisionLog | None = None
        self._tables = {
            Side.STATE: (self.pool.states, self.states),
            Side.BLOCK: (self.pool.blocks, self.blocks),
        }

    def fits(self, states: int, blocks: int) -> bool:
        """True iff `alloc(states, blocks)` would succeed now."""
        return self.pool.fits(states, blocks)

    def fits_after(self, states: int, blocks: int, *, freed_states: int, freed_blocks: int) -> bool:
        """The same question if that many live ones were freed first."""
        return self.pool.fits_after(
            states, blocks, freed_states=freed_states, freed_blocks=freed_blocks
        )

    def alloc(self, states: int, blocks: int, *, overwritten: bool = False) -> Grant | None:
        """Take states and blocks, all or nothing, and bring memory and tables up to date.

        `overwritten`: the next forward writes every layer of the states, so they need no zeros.
        """
        grant = self.pool.alloc(states, blocks)
        if grant is None:
            return None
        if self.decisions is not None:
            self.decisions.grant(grant)
        # The usual grant needs nothing of the device, not even a stream.
        if grant.moves or grant.stale_states.size or grant.stale_blocks.size:
            with self._in_order():
                self._apply(grant.moves)
                self.storage.zero_blocks(grant.stale_blocks)
                if not overwritten:
                    self.storage.zero_states(grant.stale_states)
        return grant

    def free(self, states: IdArray, blocks: IdArray) -> None:
        """Give ids back; each must be live and named once."""
        if self.decisions is not None:
            self.decisions.free(states, blocks)
        self.pool.free(states, blocks)

    def state_indices(self, ids: Sequence[int]) -> list[int]:
        """Where states are now: physical indices, right for what is enqueued next."""
        return self.pool.states.index_of(np.array(ids, dtype=np.int64)).tolist()

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states, all layers, from the first id of each pair to the second."""
        indices = self.pool.states.index_of(np.array(pairs, dtype=np.int64))
        with self._in_order():
            self.storage.copy_states(indices[:, 0], indices[:, 1])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks from the first id of each pair to the second, which was just taken."""
        indices = self.pool.blocks.index_of(np.array(pairs, dtype=np.int64))
        with self._in_order():
            self.storage.move((Move(Side.BLOCK, indices[:, 0], indices[:, 1]),))

    def warm_up(self) -> None:
        """Run every operation once, into the sink: nothing compiles or loads while serving."""
        geometry = self.geometry
        sink = np.zeros(1, dtype=np.int64)
        with self._in_order():
            for side, unit in (
                (Side.STATE, geometry.state_first),
                (Side.BLOCK, geometry.block_last),
            ):
                self.storage.move((Move(side, np.array([unit], dtype=np.int64), sink),))
                self._tables[side][1].refresh(sink)
            self.storage.zero_states(sink)
            self.storage.zero_blocks(sink)

    def compact(self, budget_bytes: int) -> int:
        """Move at most `budget_bytes` to retreat the frontiers; returns the number of moves."""
        moves = self.pool.compact(budget_bytes)
        if self.decisions is not None:
            self.decisions.moves(moves)
        if moves:
            with self._in_order():
                self._apply(moves)
        return sum(move.sources.size for move in moves)

    def clear(self) -> None:
        """Free everything; ids handed out before are void."""
        self.pool.clear()

    def violations(self) -> list[str]:
        """What a recount of the pool finds wrong, and ids on the device that were written over."""
        ids = (("state", self.slots), ("block", self.block_ids))
        found = [
            f"{name} ids on the device were written over" for name, one in ids if not one.intact()
        ]
        return self.pool.violations() + found

    def _in_order(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _apply(self, moves: tuple[Move, ...]) -> None:
        self.storage.move(moves)
        for move in moves:
            table, device = self._tables[move.side]
            device.refresh(table.id_at(np.concatenate((move.targets, move.sources))))
