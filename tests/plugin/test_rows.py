"""The host's copy of request rows against a list per row, whatever is noted and written when."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_kimi_k3 import rows as rows_module
from sgl_kimi_k3.rows import RequestRows

ROWS, TOKENS = 6, 600


def empty(block_size: int) -> RequestRows:
    """Rows as SGLang's factory builds them, in so far as they are used here."""
    pool = SimpleNamespace(
        size=ROWS,
        req_to_token=torch.empty(ROWS + 1, TOKENS, dtype=torch.int32, device="meta"),
        _aux_cache=None,
    )
    return RequestRows(pool, block_size)


class RowsMachine(RuleBasedStateMachine):
    """Batches grow rows and readers look at some of them; each row is a list in the oracle."""

    block_size = 1

    @initialize()
    def start(self) -> None:
        self.rows = empty(self.block_size)
        self.lists: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.batch = torch.empty(0, dtype=torch.int64)
        self.given = 0

    def _fresh(self, count: int) -> np.ndarray:
        self.given += count
        return np.arange(self.given - count, self.given, dtype=np.int64) * 7 % 100_003

    def _grow(self, batch: torch.Tensor, tokens: list[int]) -> None:
        """As SGLang allocates: blocks for a whole batch, then the rows' new lengths."""
        granted = []
        for row, more in zip(batch.tolist(), tokens, strict=True):
            self.lengths[row] += more
            missing = -(-self.lengths[row] // self.block_size) - len(self.lists[row])
            blocks = self._fresh(missing)
            self.lists[row] += blocks.tolist()
            granted.append(blocks)
        blocks = np.concatenate(granted)
        if len(blocks):
            self.rows.granted(blocks)
        self.rows.alloc_aux_to_lengths(
            req_pool_indices_cpu=batch,
            target_seq_lens_cpu=torch.tensor([self.lengths[row] for row in batch.tolist()]),
        )

    @rule(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        free = [row for row in range(1, ROWS + 1) if row not in self.lists]
        known = [row for row in self.lists if self.lengths[row] < TOKENS - 60]
        batch = data.draw(st.lists(st.sampled_from(free + known), min_size=1, unique=True))
        for row in batch:
            self.lists.setdefault(row, [])
            self.lengths.setdefault(row, 0)
        self._grow(torch.tensor(batch), [data.draw(st.integers(1, 30)) for _ in batch])

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def decode(self, data: st.DataObject, steps: int) -> None:
        if data.draw(st.booleans()) or not set(self.batch.tolist()) <= set(self.lists):
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True))
            self.batch = torch.tensor(chosen, dtype=torch.int64)
        for _ in range(steps if len(self.batch) else 0):
            if max(self.lengths[row] for row in self.batch.tolist()) < TOKENS:
                self._grow(self.batch, [1] * len(self.batch))

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lists)))
        held = self.lists[row]
        start = data.draw(st.integers(0, len(held)))
        stop = data.draw(st.integers(start, len(held)))
        assert self.rows.blocks(row, start, stop).tolist() == held[start:stop]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lists)))
        start = data.draw(st.integers(0, len(self.lists[row])))
        blocks = self._fresh(data.draw(st.integers(0, len(self.lists[row]) - start)))
        self.rows.put(row, start, blocks)
        self.lists[row][start : start + len(blocks)] = blocks.tolist()

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lists)))
        self.rows.free_slots = []
        self.rows.free_rows([row])
        del self.lists[row], self.lengths[row]

    @invariant()
    def little_is_noted(self) -> None:
        if hasattr(self, "rows"):
            assert len(self.rows._steps) <= rows_module.MOST_STEPS

    def teardown(self) -> None:
        for row, held in getattr(self, "lists", {}).items():
            assert self.rows.blocks(row, 0, len(held)).tolist() == held


class PagedRowsMachine(RowsMachine):
    """Blocks of four tokens: most steps take none."""

    block_size = 4


for machine in (RowsMachine, PagedRowsMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRows = RowsMachine.TestCase
TestPagedRows = PagedRowsMachine.TestCase


def test_steps_are_written_down_before_they_are_many() -> None:
    rows, batch = empty(1), torch.tensor([1, 3])
    for step in range(1, 2 * rows_module.MOST_STEPS):
        rows.granted(np.array([10 * step, 10 * step + 1]))
        rows.alloc_aux_to_lengths(
            req_pool_indices_cpu=batch, target_seq_lens_cpu=torch.tensor([step, step])
        )
        assert len(rows._steps) <= rows_module.MOST_STEPS
    assert rows.blocks(3, 99, 102).tolist() == [1001, 1011, 1021]


def test_a_step_that_gives_a_row_two_tokens_is_found() -> None:
    """One block each was granted; SGLang says that one row grew by two and one not at all."""
    rows = empty(1)
    rows.granted(np.array([5, 6]))
    rows.alloc_aux_to_lengths(
        req_pool_indices_cpu=torch.tensor([1, 2]), target_seq_lens_cpu=torch.tensor([2, 0])
    )
    with pytest.raises(AssertionError, match="1 blocks for each of"):
        rows.blocks(1, 0, 1)


@pytest.mark.parametrize("block_size", [1, 4])
def test_tokens_without_a_block_are_found(block_size: int) -> None:
    """SGLang says that a row grew past its blocks, and none was granted."""
    with pytest.raises(AssertionError, match="0 blocks for"):
        empty(block_size).alloc_aux_to_lengths(
            req_pool_indices_cpu=torch.tensor([1]), target_seq_lens_cpu=torch.tensor([1])
        )
