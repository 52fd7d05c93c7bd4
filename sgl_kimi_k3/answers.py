"""States that an answer leaves on its way, while it is decoded.

At a turn's end the live state itself goes into the tree.  These are for the prompt that parts from
the middle of an answer: a client that writes a tool call in another way than the model did, edits
or cuts off.  Without them it computes the whole answer again, all thinking included.

Every so many tokens the live state is copied right behind the step that leaves it, on the forward's
stream, so graphs and overlap know nothing of it.  Once that step's own result has been processed it
goes into the tree, where it is the first to be evicted, also while the answer goes on.  (Stock
alternates between two slots of each request and keeps the last state.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from radix import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import Req

    from radix import IdArray
    from sgl_kimi_k3.capture import Capture, Captures, Copies
    from sgl_kimi_k3.handover import Handover


class Answers:
    """Plans, takes and publishes the states that decode steps leave.

    Args:
        captures: takes and holds them.
        handover: publishes them.
        every: tokens between optional ones, which take free memory only; 0 = off.
        interval: tokens between those that may evict others, as in a prompt; 0 = off.
    """

    def __init__(
        self, captures: Captures, handover: Handover, *, every: int, interval: int
    ) -> None:
        self._captures = captures
        self._handover = handover
        self._every = every
        self._interval = interval
        self._unit = math.gcd(every, interval)
        self._left: list[tuple[Req, Capture]] = []  # not published yet

    def step(self, reqs: Sequence[Req], depths: IdArray) -> Copies | None:
        """Before a decode step after which states of `reqs` stand at `depths` (int64, in order).

        Returns what is to be copied behind it, if anything.
        """
        if self._left:
            self._publish()
        if not self._unit:
            return None
        due = np.flatnonzero(depths % self._unit == 0)
        if not due.size:  # nearly always
            return None
        leaving, taken = [], []
        for req, depth in ((reqs[row], int(depths[row])) for row in due):
            kind = self._kind(depth)
            one = None if kind is None else self._captures.on_way(req, depth, kind)
            if one is not None:
                self._left.append((req, one))
                leaving.append(req)
                taken.append([one])
        return self._captures.copies(leaving, taken, [[]] * len(taken)) if taken else None

    def _kind(self, depth: int) -> Kind | None:
        if self._interval and depth % self._interval == 0:
            return Kind.INTERVAL
        return Kind.OPPORTUNISTIC if self._every and depth % self._every == 0 else None

    def _publish(self) -> None:
        """Hand over what requests still hold and whose step's result is known."""
        unknown = []
        for req, one in self._left:
            if not self._captures.holds(req, one):
                continue  # the request ended, and what it held went with it
            if len(req.origin_input_ids) + len(req.output_ids) <= one.depth:
                unknown.append((req, one))
                continue
            req.refresh_fill_ids()
            self._handover.publish(req, one.depth)
        self._left = unknown
