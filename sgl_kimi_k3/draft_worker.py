"""SGLang's n-gram worker with its tree of drafts cut down to a chain.

Imported by the scheduler process alone, after `attention.chains` where there is no CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.speculative.ngram_worker import NGRAMWorker

from sgl_kimi_k3.chain import chain, ends, tokens_left

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class ChainWorker(NGRAMWorker):  # type: ignore[misc]  # SGLang is untyped
    """Drafts a chain that ends no later than its request must."""

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[Any, Any]:
        tokens, mask = super()._prepare_draft_tokens(batch)
        shape = (len(batch.reqs), self.draft_token_num)
        tokens = np.array(tokens).reshape(shape)
        mask = np.array(mask).reshape(*shape, self.draft_token_num) != 0
        for row, req in enumerate(batch.reqs):
            tokens[row], mask[row] = chain(
                tokens[row], mask[row], longest=tokens_left(req), last=ends(req)
            )
        return tokens.ravel(), mask.ravel()
