"""The operators as the model defines them, one token at a time, in the dtype given.

Written for reading and for tests (pass float64). Sources: the checkpoint's
`modeling_kimi_linear.py`, the Kimi K3 report (arXiv 2607.24653), fla's `naive.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + exp(-x))`.

    On some CPUs `torch.sigmoid` and `silu` round otherwise in the last few elements of a tensor
    than in the others, so that an element's bits would depend on its neighbours; `exp` does not.
    """
    return 1 / (1 + torch.exp(-x))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def l2_normalise(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last dimension: eps is added to the sum."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def short_conv(inputs: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution with SiLU (report, section 2.1.1).

    Args:
        inputs: [T, channels], before the convolution.
        weight: [channels, W]; `weight[:, W-1]` multiplies the current token.
        rows: [W-1, channels], the inputs of the W-1 tokens before, oldest first.

    Returns:
        [T, channels] outputs and the last W-1 inputs.
    """
    outputs = []
    for token in inputs:
        window = torch.cat((rows, token[None]))
        mixed = (window * weight.t()).sum(0)
        outputs.append(mixed * sigmoid(mixed))
        rows = window[1:]
    return torch.stack(outputs), rows


def log_decay(logits: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log of the retention, per head and key channel (report, equation 5).

    Args:
        logits: [T, H, K], the forget gate's projection.
        a_log: [H].
        dt_bias: [H * K], head-major.
        lower_bound: K3's safe gate (-5.0), or None for Kimi-Linear's softplus gate.

    Returns:
        [T, H, K], at most 0; at least `lower_bound` when there is one.
    """
    shifted = logits + dt_bias.view(logits.shape[-2:])
    scale = torch.exp(a_log)[:, None]
    if lower_bound is None:
        softplus = torch.log1p(torch.exp(-shifted.abs())) + shifted.clamp(min=0)
        return -scale * softplus
    return lower_bound * sigmoid(scale * shifted)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule with a decay per key channel (report, equation 1).

    Args:
        q: [T, H, K], as the short convolution left it; normalised here.
        k: [T, H, K], the same.
        v: [T, H, V].
        log_a: [T, H, K].
        beta: [T, H], in (0, 1).
        state: [H, V, K] ("V-first").

    Returns:
        [T, H, V] and the state after the last token.
    """
    q, k = l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k)
    outputs = []
    for t in range(q.shape[0]):
        state = state * torch.exp(log_a[t])[:, None, :]
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", beta[t][:, None] * error, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(outputs), state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Per-head RMS norm times `sigmoid(gate)` (report, equation 6); all [T, H, V]."""
    return rms_norm(x, weight, eps) * sigmoid(gate)


def mix(rows: Tensor, query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Block attention residuals: attend over residual rows (report, equations 8-10).

    Args:
        rows: [R, T, hidden], finished blocks and the running head; values are un-normed.
        query: [hidden], the `*_res_proj` weight.
        weight: [hidden], the `*_res_norm` weight, on the keys.
        eps: of the key norm.

    Returns:
        [T, hidden].
    """
    scores = (rms_norm(rows, weight, eps) * query).sum(-1)
    return (torch.softmax(scores, 0)[..., None] * rows).sum(0)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)` (equation 12)."""
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * sigmoid(gate) * up


def route(
    logits: Tensor, bias: Tensor, top_k: int, *, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid router; the bias only chooses (report, equation 13).

    Returns:
        Weights and expert numbers, both [T, top_k], experts ascending.
    """
    scores = sigmoid(logits)
    chosen = torch.topk(scores + bias, top_k, dim=-1).indices.sort(-1).values
    weights = scores.gather(-1, chosen)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen


def latent_attention(q: Tensor, rows: Tensor, rank: int, scale: float) -> Tensor:
    """Causal attention of the last T positions over latent rows, one KV head.

    Args:
        q: [T, H, D], absorbed queries of positions n-T .. n-1.
        rows: [n, D]; the first `rank` columns are the values.
        rank: kv_lora_rank.
        scale: softmax scale, of the expanded head size.

    Returns:
        [T, H, rank].
    """
    outputs = []
    for t in range(q.shape[0]):
        seen = rows[: rows.shape[0] - q.shape[0] + t + 1]
        outputs.append(torch.softmax(q[t] @ seen.t() * scale, -1) @ seen[:, :rank])
    return torch.stack(outputs)
