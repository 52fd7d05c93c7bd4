"""Why each request was, or was not, computed again: a line in the log and a bounded ring.

Only under `KIMI_K3_EXPLAIN=1`; without it nothing here exists.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from radix.report import losses

if TYPE_CHECKING:
    from radix import Match

logger = logging.getLogger(__name__)

REMEMBERED = 256  # requests


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the cache knew of one prompt at its first scheduling.  Lengths are in tokens.

    Attributes:
        time: seconds since 1970; for people, no decision reads it.
        rid: SGLang's request id.
        prompt_tokens: resumed + everything in `lost`.
        matched: longest known prefix, with or without bytes.
        resumed: not computed again.
        lost: computed, by reason; reasons with 0 tokens are left out.
        kind: of the checkpoint resumed from; None: computed from the start.
        junction: depth up to which the prompt is known although no state covers it, on the grid;
            a state is kept there now if it proves shared.  None: no such depth.
        diverged_at: depth where the prompt left what was known; None: it did not.
    """

    time: float
    rid: str
    prompt_tokens: int
    matched: int
    resumed: int
    lost: dict[str, int]
    kind: str | None
    junction: int | None
    diverged_at: int | None

    @classmethod
    def of(cls, rid: str, match: Match, block_size: int) -> Explanation:
        """Of a request that is scheduled for the first time."""
        parted = match.diverged and match.matched_len < match.prompt_len
        return cls(
            time=time.time(),
            rid=rid,
            prompt_tokens=match.prompt_len,
            matched=match.matched_len,
            resumed=match.resume_len,
            lost={reason.value: n for reason, n in losses(match, block_size) if n},
            kind=None if match.kind is None else match.kind.value,
            junction=match.junction,
            diverged_at=match.matched_len if parted else None,
        )

    def __str__(self) -> str:
        lost = " ".join(f"{reason}={tokens}" for reason, tokens in self.lost.items())
        return (
            f"rid={self.rid} prompt={self.prompt_tokens} matched={self.matched} "
            f"resumed={self.resumed} kind={self.kind or '-'} junction={self.junction or '-'} "
            f"diverged_at={'-' if self.diverged_at is None else self.diverged_at} lost: {lost}"
        )


class Explanations:
    """The last requests, newest last."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ring: deque[Explanation] = deque(maxlen=REMEMBERED)

    def add(self, rid: str, match: Match) -> None:
        """Explain one request."""
        explanation = Explanation.of(rid, match, self._block_size)
        self._ring.append(explanation)
        logger.info("kimi_k3 explain: %s", explanation)

    def rows(self) -> list[dict[str, Any]]:
        """As JSON, oldest first."""
        return [asdict(explanation) for explanation in self._ring]
