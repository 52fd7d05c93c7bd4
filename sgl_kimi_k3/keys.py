"""What identifies a prefix: token ids and the tenant they belong to; looking one up."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from radix import Match, PrefixCache, TokenArray

Namespace = tuple[str | None, str | None]


def tokens_of(ids: Any, count: int | None = None) -> TokenArray:
    """The first `count` of SGLang's token ids (`array('q')`), int64, not to be written to.

    A view of SGLang's array would keep it from growing, so this is one of their bytes, copied once:
    `radix` compares those.
    """
    if count is not None and count < len(ids):
        ids = ids[:count]
    if isinstance(ids, array) and ids.typecode == "q":
        return np.frombuffer(ids.tobytes(), dtype=np.int64)
    return np.array(ids, dtype=np.int64)


def namespace_of(owner: Any) -> Namespace:
    """What separates tenants: `extra_key` (SGLang puts the LoRA id in it) and the cache salt."""
    return (owner.extra_key, owner.cache_salt or None)


def known_of(req: Req, cache: PrefixCache) -> Match:
    """What a waiting request could resume now, its answer so far included."""
    return cache.match(tokens_of(req.origin_input_ids + req.output_ids), namespace_of(req))
