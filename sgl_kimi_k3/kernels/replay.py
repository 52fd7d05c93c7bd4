"""ReplaySSM: a state goes on by the accepted steps of a draft window, from what they were fed.

Verifying a window of W drafts needs the state after each of them, and keeps none: a state of one
head is 64 KB in float32, its inputs of one step (v, k, log decay, beta) are about 1 KB.  Once it is
known how many steps count, the state before the window is advanced by exactly those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kimi_k3.kernels.decode import advance


def fold(
    k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, states: Tensor, accepted: Tensor
) -> Tensor:
    """The states after each sequence's first `accepted` steps of its window.

    Bit for bit those that as many calls of `kda_decode` leave: the same steps in the same order,
    rounded to the states' dtype after each.

    Args:
        k: [B, W, H, K], as the short convolution left it.
        v: [B, W, H, V].
        log_a: [B, W, H, K].
        beta: [B, W, H].
        states: [B, H, V, K], before the window.
        accepted: [B] integers in [0, W].

    Returns:
        [B, H, V, K] of the states' dtype.
    """
    states = states.clone()
    for step in range(int(accepted.max())):
        on = torch.nonzero(accepted > step)[:, 0]
        inputs = (part[on, step] for part in (k, v, log_a, beta))
        states[on] = advance(*inputs, states[on]).to(states.dtype)
    return states


def fold_rows(inputs: Tensor, rows: Tensor, accepted: Tensor) -> Tensor:
    """The short convolution's rows after the accepted steps: the last inputs before them.

    Args:
        inputs: [..., B, W, channels], before the convolution.
        rows: [..., B, R, channels], before the window.
        accepted: [B] integers in [0, W].

    Returns:
        [..., B, R, channels] of the rows' dtype.
    """
    seen = torch.cat((rows, inputs.to(rows.dtype)), -2)
    where = accepted[:, None] + torch.arange(rows.shape[-2], device=rows.device)
    return torch.take_along_dim(seen, where[(None,) * (rows.dim() - 3)][..., None].long(), -2)
