"""Where messages end: positions at which another prompt is likely to part from this one.

Kimi K3's chat format ends every message with one control token and opens it with another
(`<|open|>message role="system"<|sep|>...<|end_of_msg|>`).  Two ends matter for reuse: the end of
the leading system messages (tools, effort, system prompt), which other conversations share, and
the end of the last input message when one-shot options (`tool_choice`, `response_format`) follow
it as system messages, because those are gone from the next prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from radix import TokenArray

OPEN, SEPARATOR, END_OF_MESSAGE = "<|open|>", "<|sep|>", "<|end_of_msg|>"
SYSTEM_HEADER = 'message role="system"'
HEADER_TOKENS_MAX = 64


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer this needs."""

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Id of a control token."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""

    unk_token_id: int | None


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """Finds message ends by control token id; headers are read through the tokenizer once each."""

    open_id: int
    separator_id: int
    end_id: int
    tokenizer: Tokenizer
    _is_system: dict[tuple[int, ...], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> BoundaryRule | None:
        """The rule for this tokenizer, or None where it lacks K3's control tokens."""
        if tokenizer is None:
            return None
        unknown = (None, getattr(tokenizer, "unk_token_id", None))
        ids = [tokenizer.convert_tokens_to_ids(t) for t in (OPEN, SEPARATOR, END_OF_MESSAGE)]
        if any(i in unknown for i in ids):
            return None
        open_id, separator_id, end_id = (int(i) for i in ids if i is not None)
        return cls(open_id, separator_id, end_id, tokenizer)

    def boundaries(self, tokens: TokenArray) -> tuple[int, ...]:
        """Ascending depths (token counts) worth a state; at most two, none without messages."""
        ends = np.flatnonzero(tokens == self.end_id) + 1
        if not ends.size:
            return ()
        starts = np.concatenate(([0], ends[:-1]))
        lead = 0
        while lead < ends.size and self._system_at(tokens, int(starts[lead])):
            lead += 1
        tail = ends.size
        while tail > lead and self._system_at(tokens, int(starts[tail - 1])):
            tail -= 1
        found = []
        if lead:
            found.append(int(ends[lead - 1]))
        if lead < tail < ends.size:
            found.append(int(ends[tail - 1]))
        return tuple(found)

    def _system_at(self, tokens: TokenArray, start: int) -> bool:
        """Whether the message that opens at `start` is a system message."""
        if tokens[start] != self.open_id:
            return False
        window = tokens[start + 1 : start + 1 + HEADER_TOKENS_MAX]
        stop = np.flatnonzero(window == self.separator_id)
        if not stop.size:
            return False
        header = tuple(window[: stop[0]].tolist())
        if header not in self._is_system:
            self._is_system[header] = self.tokenizer.decode(list(header)).startswith(SYSTEM_HEADER)
        return self._is_system[header]
