"""A yardstick that knows every future prompt, over the same tree and pool as `ours`.

What it does, exactly. A prefill leaves a state wherever a prompt still to come will part from this
one (or this one's end or turn's end lies on its way), and on the interval grid. The first to be
evicted is the checkpoint with the least

    tokens to recompute from the next shallower checkpoint
    ---------------------------------------------------------------------------
    bytes that go with it  x  time until the next prompt that will resume there

A prompt resumes there if it contains the checkpoint's whole prefix and, as things stand, no deeper
checkpoint. None to come means 0, the deepest first. With objects of many sizes this greedy order is
not optimal, so the result is a yardstick and no upper bound.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from radix import Kind, Stop
from radix.node import fallback_len, only_len
from radix.sim.policies.ours import Ours

if TYPE_CHECKING:
    import numpy.typing as npt

    from radix import Costs, Match
    from radix.checkpoint import Checkpoint
    from radix.node import Node
    from radix.sim.server import Setup
    from radix.sim.trace import Request, Trace

_NEVER = -1
_TRIED = 64  # prompts looked at to find one that a deeper checkpoint does not serve


class Future:
    """Which prompts contain a block, in order of arrival, and which are still to come."""

    def __init__(self, trace: Trace, longest_len: int) -> None:
        self.requests = trace.requests
        self.block_size = trace.requests[0].block_size
        self.gone = np.array([r.computed_len > longest_len for r in trace.requests])
        prompts = [r.ids[: -(-r.prompt_len // r.block_size)] for r in trace.requests]
        lengths = np.array([len(ids) for ids in prompts])
        ids = np.concatenate(prompts)
        order = np.argsort(ids, kind="stable")
        self._first: npt.NDArray[np.int64] = np.zeros(trace.id_limit + 1, dtype=np.int64)
        np.cumsum(np.bincount(ids, minlength=trace.id_limit), out=self._first[1:])
        self._prompts = np.repeat(np.arange(len(prompts), dtype=np.int32), lengths)[order]
        later = np.empty(len(ids), dtype=np.int32)
        later[order] = self._first[ids[order] + 1] - 1 - np.arange(len(ids))
        self._later = np.split(later, np.cumsum(lengths)[:-1])

    def after(self, block: int, number: int) -> npt.NDArray[np.int32]:
        """Prompts that contain `block` and come after prompt `number`."""
        prompts = self._prompts[self._first[block] : self._first[block + 1]]
        return prompts[np.searchsorted(prompts, number, "right") :]

    def stops(self, request: Request) -> list[int]:
        """Depths at which a later prompt parts from this one; its end, if one goes on there."""
        size, length = self.block_size, request.prompt_len
        later = self._later[request.number]
        answered = len(self.after(self.block_at(request, request.computed_len), request.number))
        fewer = later - np.append(later[1:], answered)
        return [min((int(i) + 1) * size, length) for i in np.flatnonzero(fewer > 0)]

    def goes_on(self, request: Request) -> bool:
        """Whether a later prompt contains the answer."""
        block = self.block_at(request, request.computed_len)
        return len(self.after(block, request.number)) > 0

    def block_at(self, request: Request, depth: int) -> int:
        """The id of the block that ends at or contains depth."""
        return int(request.ids[(depth - 1) // self.block_size])

    def contains(self, number: int, depth: int, block: int) -> bool:
        """Whether a prompt could resume at `depth`, in `block`."""
        request = self.requests[number]
        return depth < request.prompt_len and self.block_at(request, depth) == block


class NextUse:
    """The order of victims, by what is known of the future."""

    def __init__(self, future: Future, costs: Costs) -> None:
        self.future = future
        self.now_us = 0
        self.number = -1  # the latest prompt that was admitted
        self._costs = costs
        self._heap: list[tuple[float, int, int, Checkpoint]] = []
        self._serial = 0

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """It takes users from the next shallower one."""
        self.update(checkpoint, now)
        for node in checkpoint.node.lineage():
            if node.checkpoint is not None and node is not checkpoint.node:
                self.update(node.checkpoint, now)
                break

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """Score it anew."""
        del now
        self._serial += 1
        checkpoint.note = self._serial
        if checkpoint.evictable:
            entry = (*self._score(checkpoint), self._serial, checkpoint)
            heapq.heappush(self._heap, entry)

    def reconsider(self, checkpoint: Checkpoint, now: int) -> None:
        """Score it anew."""
        self.update(checkpoint, now)

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """Its next user is another one."""
        checkpoint.used = now
        checkpoint.hits += 1
        if not checkpoint.lost:
            self.update(checkpoint, now)

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """It is gone."""
        del now
        checkpoint.note = None

    def forget(self, checkpoint: Checkpoint) -> None:
        """It is gone."""
        checkpoint.note = None

    def victim(self, now: int) -> Checkpoint | None:
        """Scores rise as the next use comes near: the top is scored again until it stays."""
        while self._heap:
            score, depth, serial, checkpoint = self._heap[0]
            if checkpoint.note != serial:
                heapq.heappop(self._heap)
            elif self._score(checkpoint) != (score, depth):
                heapq.heappop(self._heap)
                self.update(checkpoint, now)
            else:
                return checkpoint
        return None

    def _score(self, checkpoint: Checkpoint) -> tuple[float, int]:
        """Worth, then depth: of what is worth nothing the deepest goes first."""
        node = checkpoint.node
        user = self._next_user(node)
        if user == _NEVER:
            return 0.0, -checkpoint.depth
        wait = max(self.future.requests[user].arrival_us - self.now_us, 1)
        loss = self._costs.recompute(fallback_len(node), checkpoint.depth)
        freed = self._costs.state_bytes + only_len(node) * self._costs.token_bytes
        return loss / freed / wait, -checkpoint.depth

    def _next_user(self, node: Node) -> int:
        future, block = self.future, int(node.tokens[-1]) // self.future.block_size
        below = _held_below(node, future.block_size)
        for number in future.after(block, self.number - _TRIED)[: 3 * _TRIED].tolist():
            if future.gone[number] or not future.contains(number, node.end, block):
                continue
            if not any(future.contains(number, depth, other) for depth, other in below):
                return int(number)
        return _NEVER


def _held_below(node: Node, block_size: int) -> list[tuple[int, int]]:
    """Depth and block of the next deeper checkpoints on every way down."""
    found: list[tuple[int, int]] = []
    stack = [child for child in node.children.values() if child.resident]
    while stack:
        below = stack.pop()
        if below.checkpoint is not None:
            found.append((below.end, int(below.tokens[-1]) // block_size))
        else:
            stack.extend(child for child in below.children.values() if child.resident)
    return found


class Clairvoyant(Ours):
    """`ours` with its two decisions made by looking ahead."""

    name = "clairvoyant"

    def __init__(self, setup: Setup) -> None:
        geometry = setup.model.geometry(setup.capacity_bytes, setup.block_size)
        longest = geometry.blocks_above(geometry.state_end(1)) * setup.block_size
        self.order = NextUse(Future(setup.trace, longest), setup.model.token_costs)
        super().__init__(setup, self.order)

    def begin(self, request: Request) -> int | None:
        """As `ours`, with other stops."""
        order = self.order
        order.now_us = max(order.now_us, request.arrival_us)
        order.future.gone[request.number] = True
        resumed = super().begin(request)
        if resumed is None:
            order.future.gone[request.number] = False
            return None
        order.number = max(order.number, request.number)
        lease = self._running[request].lease
        lease.stops = self._stops(request, lease.match)
        return resumed

    def _stops(self, request: Request, match: Match) -> tuple[Stop, ...]:
        start, end = match.resume_len, request.prompt_len
        size, interval = self.cache.config.block_size, self.cache.config.interval
        depths = {depth - depth % size: Kind.JUNCTION for depth in self.order.future.stops(request)}
        for depth in range(interval, end, interval) if interval else ():
            depths.setdefault(depth, Kind.INTERVAL)
        return tuple(Stop(d, depths[d]) for d in sorted(depths) if start < d <= end)

    def _turn_end(self, request: Request) -> int | None:
        return super()._turn_end(request) if self.order.future.goes_on(request) else None


def make(setup: Setup) -> Clairvoyant:
    """The yardstick."""
    return Clairvoyant(setup)
