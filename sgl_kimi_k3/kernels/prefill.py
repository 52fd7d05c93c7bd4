"""KDA prefill by chunks (report, section 2.1.1, the chunk form of equation 1).

Chunks are cut at absolute multiples of `CHUNK`, wherever the sequence is entered, and the state is
rounded to its stored type at each of those cuts. A prefill that stops at a multiple of `CHUNK` and
goes on from the stored state therefore repeats the same arithmetic and gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from sgl_kimi_k3.kernels import naive

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 16
"""Tokens per chunk."""

LOG_DECAY_MIN = -40.0
"""A retention below e^-40 is nothing in float32; CHUNK of them still invert within float64."""


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_a: Tensor,
    beta: Tensor,
    *,
    states: Tensor,
    lens: Sequence[int],
    depths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Run N sequences laid end to end (`naive.delta_rule` for each, float64 inside).

    Args:
        q: [T, H, K], as the short convolution left it.
        k: [T, H, K], the same.
        v: [T, H, V].
        log_a: [T, H, K].
        beta: [T, H], in (0, 1).
        states: [N, H, V, K], the state each sequence starts from.
        lens: N lengths, summing to T.
        depths: N absolute positions of the sequences' first tokens.

    Returns:
        [T, H, V] float64, and the final states [N, H, V, K] in the states' type, float32 at least
        (a 16-bit state is rounded where it is stored, not at every chunk).
    """
    assert sum(lens) == q.shape[0], f"lens sum to {sum(lens)}, there are {q.shape[0]} tokens"
    out = torch.empty(v.shape, dtype=torch.float64, device=v.device)
    final = states.to(torch.promote_types(states.dtype, torch.float32), copy=True)
    start = 0
    for i, (length, depth) in enumerate(zip(lens, depths, strict=True)):
        part = slice(start, start + length)
        out[part], final[i] = _prefill_one(
            q[part], k[part], v[part], log_a[part], beta[part], final[i], depth
        )
        start += length
    return out, final


def _prefill_one(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, state: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """One sequence whose first token stands at `depth`; returns [T, H, V] and [H, V, K]."""
    length, lead = q.shape[0], depth % CHUNK
    q = naive.l2_normalise(q.double()) * q.shape[-1] ** -0.5
    k = naive.l2_normalise(k.double())
    beta = _chunked(beta[..., None], lead)
    # A padding row has beta 0 and decay 1: it leaves the state as it is.
    decay = _chunked(log_a.clamp(min=LOG_DECAY_MIN), lead).cumsum(2)
    q, k, v = _chunked(q, lead) * decay.exp(), _chunked(k, lead), _chunked(v, lead)
    k_in, k_out = k * decay.exp(), k * torch.exp(-decay)
    kept = torch.exp(decay[:, :, -1:])
    k_last = k * torch.exp(decay[:, :, -1:] - decay)
    stored, state = state.dtype, state.double()
    outputs = []
    # Products by chunk, never over all of them: a BLAS may sum otherwise for another batch.
    for c in range(q.shape[0]):
        # U = (I + tril(beta K_in K_out))^-1 (beta V - beta K_in S^T), solved for both at once.
        lower = beta[c] * (k_in[c] @ k_out[c].transpose(-1, -2))
        right = beta[c] * torch.cat((v[c], k_in[c]), -1)
        solved = torch.linalg.solve_triangular(
            lower.tril(-1), right, upper=False, unitriangular=True
        )
        fixed, folded = solved.split((v.shape[-1], k.shape[-1]), -1)
        inner = (q[c] @ k_out[c].transpose(-1, -2)).tril()
        update = fixed - folded @ state.transpose(-1, -2)
        outputs.append(q[c] @ state.transpose(-1, -2) + inner @ update)
        state = state * kept[c] + update.transpose(-1, -2) @ k_last[c]
        state = state.to(stored).double()
    out = torch.stack(outputs).transpose(1, 2).flatten(0, 1)
    return out[lead : lead + length], state.to(stored)


def _chunked(x: Tensor, lead: int) -> Tensor:
    """[T, H, D] -> [chunks, H, CHUNK, D] float64, contiguous, zero rows before and after."""
    x = functional.pad(x.double(), (0, 0, 0, 0, lead, -(x.shape[0] + lead) % CHUNK))
    return x.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()
