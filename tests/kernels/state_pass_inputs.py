"""Operands of one state pass, and what it must agree with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from sglang.kernels.ops.attention.fla import chunk_delta_h
from torch.nn import functional

from sgl_kimi_k3.prefill_graphs import Tables
from sgl_kimi_k3.state_pass import CHUNK, Plan, pass_states

SLOTS = 12


@dataclass(frozen=True)
class Inputs:
    """Sequences laid end to end; every whole chunk's end is asked for, slots in falling order."""

    lengths: list[int]
    k: torch.Tensor
    w: torch.Tensor
    u: torch.Tensor
    gk: torch.Tensor
    states: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    wanted: list[tuple[int, int, int]]

    @classmethod
    def random(cls, lengths, *, heads, key_size, value_size, dtype, device, seed=0) -> Inputs:
        """Factors small enough that states stay of order one over many chunks."""
        generator = torch.Generator(device).manual_seed(seed)
        total = sum(lengths)

        def normal(size, scale):
            shape = (1, total, heads, size)
            return torch.randn(shape, generator=generator, device=device) * scale

        k = functional.normalize(normal(key_size, 1.0), dim=-1).to(dtype)
        w = functional.normalize(normal(key_size, 1.0), dim=-1).to(dtype) * 0.5
        decay = -torch.rand((1, total, heads, key_size), generator=generator, device=device) * 0.1
        gk = torch.cat(
            [
                chunk.cumsum(1)
                for sequence in decay.split(lengths, dim=1)
                for chunk in sequence.split(CHUNK, dim=1)
            ],
            dim=1,
        )
        places = [(row, at) for row, n in enumerate(lengths) for at in range(CHUNK, n, CHUNK)]
        slots = SLOTS + len(lengths) + len(places)
        return cls(
            lengths=list(lengths),
            k=k,
            w=w,
            u=normal(value_size, 1.0).to(dtype),
            gk=gk.contiguous(),
            states=torch.randn(
                (slots, heads, value_size, key_size), generator=generator, device=device
            ),
            rows=torch.arange(len(lengths), dtype=torch.int32, device=device) + 2,
            starts=torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
            wanted=[(row, at, slots - 1 - i) for i, (row, at) in enumerate(places)],
        )

    def ours(self, *, wanted: list[tuple[int, int, int]] | None = None):
        """Entry states, v_new and the pool afterwards."""
        states = self.states.clone()
        plan = Plan.of(self.lengths, self.wanted if wanted is None else wanted)
        targets, firsts, _, _ = plan.on(states.device)
        entries, v_new = pass_states(
            self.k,
            self.w,
            self.u,
            self.gk,
            states=states,
            rows=self.rows,
            starts=self.starts,
            targets=targets,
            firsts=firsts,
        )
        return entries, v_new, states

    def stock(self):
        """The same three from SGLang's kernel, which writes no states inside."""
        states = self.states.clone()
        entries, v_new = chunk_delta_h.chunk_gated_delta_rule_fwd_h(
            k=self.k,
            w=self.w,
            u=self.u,
            gk=self.gk,
            initial_state=states,
            initial_state_indices=self.rows,
            cu_seqlens=self.starts,
            use_exp2=True,
        )
        return entries, v_new, states

    def compare_with_stock(self, *, tolerance: float) -> None:
        """As stock's kernel; a state written inside rounds to the chunk's entry state."""
        entries, v_new, states = self.ours()
        expected, live = self.stock(), self.rows.long()
        for found, right in (
            (entries, expected[0]),
            (v_new, expected[1]),
            (states[live], expected[2][live]),
        ):
            assert (found.float() - right.float()).abs().max() <= tolerance
        chunks = [-(-n // CHUNK) for n in self.lengths]
        for row, at, slot in self.wanted:
            entry = entries[0, sum(chunks[:row]) + at // CHUNK]
            assert torch.equal(states[slot].to(entry.dtype), entry), (row, at)
        untouched = [
            slot
            for slot in range(len(states))
            if slot not in live.tolist() and slot not in {one[2] for one in self.wanted}
        ]
        assert torch.equal(states[untouched], self.states[untouched])

    def compare_with_padded(self, *, sequences: int, chunks: int) -> None:
        """As a graph's tables are: rows without a sequence, chunks without a token."""
        plan, (entries, v_new, right) = Plan.of(self.lengths, self.wanted), self.ours()
        states = self.states.clone()
        tables = Tables.of(chunks, states.device)
        tables.fill(plan, conv_rows=3)
        spare = sequences - len(self.lengths)
        found = pass_states(
            self.k,
            self.w,
            self.u,
            self.gk,
            states=states,
            rows=functional.pad(self.rows, (0, spare), value=-1),
            starts=functional.pad(self.starts, (0, spare), value=int(self.starts[-1])),
            targets=tables.rows[0],
            firsts=torch.tensor([*plan.firsts, *[plan.chunks] * (spare + 1)], dtype=torch.int32),
        )
        assert torch.equal(found[0][:, : plan.chunks], entries)
        assert torch.equal(found[1], v_new)
        assert torch.equal(states, right)

    def compare_with_truth(self, *, tolerance: float) -> None:
        """A state written inside is the state of a pass that ends there, in float64."""
        _, _, states = self.ours()
        wide = replace(
            self,
            **{
                f.name: getattr(self, f.name).double()
                for f in fields(self)
                if f.name in ("k", "w", "u", "gk", "states")
            },
        )
        for row, at, slot in self.wanted:
            right = wide._definition(row, at)
            error = (states[slot] - right).norm() / right.norm()
            assert error < tolerance, (row, at, error)

    def _definition(self, row: int, tokens: int) -> torch.Tensor:
        start = sum(self.lengths[:row])
        state = self.states[int(self.rows[row])]
        for first in range(start, start + tokens, CHUNK):
            span = slice(first, first + CHUNK)
            k, w, u, gk = (one[0, span] for one in (self.k, self.w, self.u, self.gk))
            new = u - torch.einsum("thk,hvk->thv", w, state)
            state = state * torch.exp2(gk[-1])[:, None, :]
            state = state + torch.einsum("thv,thk->hvk", new, k)
        return state
