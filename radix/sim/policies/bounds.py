"""The two ends of the scale: no cache, and memory without end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from radix.sim.server import Setup
    from radix.sim.trace import Request


class Null:
    """No cache: resumes nothing, and holds no memory that could run out."""

    name = "null"

    def __init__(self, setup: Setup) -> None:
        del setup

    def begin(self, request: Request) -> int | None:
        """Always from the first token."""
        del request
        return 0

    def extend(self, request: Request, up_to: int) -> bool:
        """Nothing to keep."""
        del request, up_to
        return True

    def finish(self, request: Request) -> None:
        """Nothing to give back."""
        del request

    def counters(self) -> dict[str, int]:
        """None."""
        return {}


class Unbounded:
    """Everything ever computed, with a state after every token: the most that reuse can give."""

    name = "unbounded"

    def __init__(self, setup: Setup) -> None:
        self._known: npt.NDArray[np.int64] = np.zeros(setup.trace.id_limit, dtype=np.int64)
        self._block_size = setup.trace.requests[0].block_size

    def begin(self, request: Request) -> int | None:
        """The longest prefix shared with anything computed before."""
        known = self._known[request.ids]
        partial = np.flatnonzero(known < self._block_size)
        whole = int(partial[0]) if len(partial) else len(known)
        extra = int(known[whole]) if len(partial) else 0
        return min(whole * self._block_size + extra, request.prompt_len - 1)

    def extend(self, request: Request, up_to: int) -> bool:
        """Remember how much of each block is known."""
        whole, extra = divmod(up_to, self._block_size)
        self._known[request.ids[:whole]] = self._block_size
        if extra:
            last = request.ids[whole]
            self._known[last] = max(int(self._known[last]), extra)
        return True

    def finish(self, request: Request) -> None:
        """Nothing to give back."""
        del request

    def counters(self) -> dict[str, int]:
        """Tokens held at the end."""
        return {"tokens": int(self._known.sum())}
