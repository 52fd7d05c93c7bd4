"""Token arrays: the common prefix of two of them, by vectorised comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int64]
IdArray = npt.NDArray[np.int64]

_SHORT = 4_096  # tokens up to which two copies and a memcmp are faster than a vector of booleans
_STRIDE = 32_768  # tokens compared at once: both pieces and the result stay in the L2 cache

NO_IDS: IdArray = np.zeros(0, dtype=np.int64)
NO_IDS.setflags(write=False)

ITEM_BYTES = NO_IDS.itemsize  # of a token in `Key.raw`


@dataclass(frozen=True, slots=True)
class Key:
    """A sequence of tokens, as numbers and as the bytes that edges are compared with.

    Made once for a call, so that following it costs a memcmp an edge and copies nothing.
    """

    tokens: TokenArray
    raw: bytes

    @classmethod
    def of(cls, tokens: TokenArray) -> Key:
        """The bytes are a copy, unless `tokens` are all of a `bytes` object."""
        owner = tokens.base
        if isinstance(owner, bytes) and len(owner) == tokens.nbytes:
            return cls(tokens, owner)
        return cls(tokens, tokens.tobytes())

    def __len__(self) -> int:
        return len(self.tokens)


def common_len(left: TokenArray, right: TokenArray) -> int:
    """Length of the longest common prefix.

    Costs a memcmp of the first 4,096 tokens and one vectorised comparison per further 32,768, and
    stops in the first piece that differs.

    >>> common_len(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    limit = min(len(left), len(right))
    start = min(limit, _SHORT)
    head, other = left[:start], right[:start]
    if head.tobytes() != other.tobytes():
        return int((head != other).argmax())
    while start < limit:
        stop = min(start + _STRIDE, limit)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start = stop
    return limit


def check_tokens(tokens: TokenArray) -> None:
    """Raise ValueError unless `tokens` is what keys are made of: int64, 1-D."""
    if tokens.dtype != np.int64 or tokens.ndim != 1:
        raise ValueError(f"tokens must be int64 and 1-D, got {tokens.dtype} {tokens.shape}")
