"""What identifies a prefix: token ids and the tenant they belong to; looking one up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from radix import Match, PrefixCache, TokenArray

Namespace = tuple[str | None, str | None]


def tokens_of(ids: Any) -> TokenArray:
    """SGLang's token ids (`array('q')`) as an int64 copy: a view would freeze its array."""
    return np.array(ids, dtype=np.int64)


def namespace_of(owner: Any) -> Namespace:
    """What separates tenants: `extra_key` (SGLang puts the LoRA id in it) and the cache salt."""
    return (owner.extra_key, owner.cache_salt or None)


def known_of(req: Req, cache: PrefixCache) -> Match:
    """What a waiting request could resume now, its answer so far included."""
    return cache.match(tokens_of(req.origin_input_ids + req.output_ids), namespace_of(req))
