"""Drafts on a CPU: torch in place of the kernels that SGLang's n-gram worker calls.

All of it is about a chain: a node's only child is the next one, and nodes that are no draft have
neither parent nor child.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_COMPILED = "sgl_kernel.speculative"  # cannot be loaded without CUDA


def install() -> None:
    """Put these functions where SGLang looks theirs up; call before its worker is imported."""
    compiled = ModuleType(_COMPILED)
    compiled.reconstruct_indices_from_tree_mask = link  # type: ignore[attr-defined]
    sys.modules.setdefault(_COMPILED, compiled)
    worker = importlib.import_module("sglang.srt.speculative.ngram_worker")
    verify = importlib.import_module("sglang.srt.speculative.eagle_utils")
    allocation = importlib.import_module("sglang.srt.mem_cache.allocation")
    worker._is_cpu = True  # type: ignore[attr-defined]  # noqa: SLF001  # no mask of whole prefixes
    worker.reconstruct_indices_from_tree_mask_func = link  # type: ignore[attr-defined]
    worker.assign_extend_cache_locs_func = window_ids  # type: ignore[attr-defined]
    verify.verify_tree_greedy_func = accept_greedy  # type: ignore[attr-defined]
    verify.tree_speculative_sampling_target_only = accept_sampled  # type: ignore[attr-defined]
    verify.top_k_renorm_prob = keep_top_k  # type: ignore[attr-defined]
    verify.top_p_renorm_prob = keep_top_p  # type: ignore[attr-defined]
    allocation.assign_req_to_token_pool_func = write_rows  # type: ignore[attr-defined]


def link(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    requests: int,
    window: int,
) -> None:
    """Fill in what a chain's mask implies: positions [B * W], and [B, W] of the links.

    Every node lies at its place in the window, as its KV row does.
    """
    places = torch.arange(window)
    positions.copy_((lengths[:, None] + places).flatten())
    index.copy_(torch.arange(requests * window).view(requests, window))
    below = mask.view(requests, window, window).diagonal(-1, 1, 2)
    child.fill_(-1)
    child[:, :-1] = torch.where(below, places[1:], -1)
    sibling.fill_(-1)


def window_ids(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, **sizes: Any
) -> Tensor:
    """Token ids of each request's window, out of its row: int64 [B * W]."""
    places = start_offset[:, None] + torch.arange(sizes["draft_token_num"])
    return req_to_token[req_pool_indices[:, None], places].flatten().to(torch.int64)


def write_rows(
    rows: Tensor, table: Tensor, starts: Tensor, stops: Tensor, ids: Tensor, _requests: int
) -> None:
    """Write each request's new token ids into its row."""
    first = 0
    for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
        table[row, start:stop] = ids[first : first + stop - start]
        first += stop - start


def accept_greedy(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_next_token: Tensor,
    target_predict: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts as long as they are what the model says; then its own token.

    Args:
        predicts: int32 [B * W], filled in: the token behind each accepted node.
        accept_index: int32 [B, W], filled in: accepted nodes of the batch, -1 behind them.
        accept_token_num: int32 [B], filled in: accepted drafts.
        candidates: [B, W], the window's tokens.
        retrieve_next_token: [B, W], each node's child, -1 for none.
        target_predict: [B, W], the model's token behind each node.
    """
    for row, (tokens, said) in enumerate(
        zip(candidates.tolist(), target_predict.tolist(), strict=True)
    ):
        has_child = (retrieve_next_token[row] >= 0).tolist()
        count = 0
        while has_child[count] and tokens[count + 1] == said[count]:
            count += 1
        _note(row, said[: count + 1], predicts, accept_index, accept_token_num)
    return predicts, accept_index, accept_token_num


def accept_sampled(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_next_token: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    **_: Any,
) -> None:
    """Accept a draft with the probability the model gives it; else sample among the other tokens.

    Every token then has the model's distribution.  As `accept_greedy`, with probabilities [B, W,
    vocabulary] in place of tokens, and uniform numbers [B, W] and [B].
    """
    for row, tokens in enumerate(candidates.tolist()):
        taken: list[int] = []
        probs = target_probs[row, 0].double()
        while retrive_next_token[row, len(taken)] >= 0:
            draft = tokens[len(taken) + 1]
            if uniform_samples[row, len(taken)] >= probs[draft]:
                probs = probs.clone()
                probs[draft] = 0.0
                break
            taken.append(draft)
            probs = target_probs[row, len(taken)].double()
        below = probs.cumsum(0)
        coin = uniform_samples_for_final_sampling[row].double() * below[-1]
        final = int(torch.searchsorted(below, coin, right=True).clamp(max=len(probs) - 1))
        _note(row, [*taken, final], predicts, accept_index, accept_token_num)


def _note(row: int, said: list[int], predicts: Tensor, index: Tensor, drafts: Tensor) -> None:
    first = row * index.shape[1]
    predicts[first : first + len(said)] = torch.tensor(said, dtype=predicts.dtype)
    index[row, : len(said)] = first + torch.arange(len(said), dtype=index.dtype)
    drafts[row] = len(said) - 1


def keep_top_k(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Probabilities [N, vocabulary] of each row's `top_ks` most likely tokens, renormalised."""
    ranked = probs.sort(-1, descending=True)
    ranked.values[torch.arange(probs.shape[-1]) >= top_ks[:, None]] = 0.0
    return _normal(torch.zeros_like(probs).scatter_(-1, ranked.indices, ranked.values))


def keep_top_p(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Probabilities [N, vocabulary] of the most likely tokens that make up `top_ps`."""
    ranked = probs.sort(-1, descending=True)
    before = ranked.values.cumsum(-1) - ranked.values
    ranked.values[before > top_ps[:, None]] = 0.0
    return _normal(torch.zeros_like(probs).scatter_(-1, ranked.indices, ranked.values))


def _normal(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)
