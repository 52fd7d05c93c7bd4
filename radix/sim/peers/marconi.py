"""Marconi (Pan et al., MLSys 2025, arXiv 2411.19379), from the paper; none of its code is used.

What is kept: a sequence leaves at most two states, one after its last decoded token, and one where
it parts from a cached sequence, if it does. That point is found by inserting the prompt into the
tree on trial before it runs, so a prefix that only prompts share is reused from its third sight.

What goes: among nodes with at most one child, the one with the lowest `recency + alpha *
efficiency`, each scaled to [0, 1] over these nodes. Recency is the time of the last use of exactly
that node. Efficiency is the FLOPs that a hit at the node saves over one at its parent, per byte of
the node: its state and the KV of its edge. A leaf goes with its KV; the KV of a node with one
child is its child's then.

alpha: 0 until something is evicted for the first time. Then as many requests as came before, five
times over, are watched; they and those before are replayed under every alpha of 0, 0.1, .. 2; the
alpha under which most FLOPs would have been saved holds from then on. The replay's unit is the
trace's block instead of the token.

Tree, pool and leases are the product's own, with memory for prompt, answer and live state as
there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from radix import Costs, Kind
from radix.sim.peers.lru import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from radix.checkpoint import Checkpoint
    from radix.node import Node
    from radix.sim.policies.ours import Ours
    from radix.sim.server import Setup
    from radix.sim.trace import Request

KINDS = frozenset({Kind.JUNCTION, Kind.TURN_END})
WINDOW = 5  # times the requests before the first eviction; the paper gives 5 to 15
ALPHAS = tuple(step / 10 for step in range(21))


class FlopAware:
    """Recency and FLOPs per byte, weighted by `alpha`; an `EvictionPolicy`.

    Facts of all held checkpoints stand in arrays, so that a victim costs a few vector operations.
    A checkpoint whose neighbours changed is looked at again before the next victim.
    """

    def __init__(self, costs: Costs, alpha: float) -> None:
        self.alpha = alpha
        self.victims = 0
        self._costs = costs
        self._held: list[Checkpoint | None] = []
        self._free: list[int] = []
        self._changed: dict[Checkpoint, None] = {}
        self._used: npt.NDArray[np.float64] = np.zeros(64)
        self._efficiency: npt.NDArray[np.float64] = np.zeros(64)
        self._able: npt.NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)
        self._slim: npt.NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)  # at most one child

    def keep(self, checkpoint: Checkpoint, now: int) -> None:
        """Amortised O(edges to its neighbours)."""
        if not self._free:
            self._free.append(len(self._held))
            self._held.append(None)
            if len(self._held) > len(self._used):
                grown = len(self._used)
                self._used = np.concatenate((self._used, np.zeros(grown)))
                self._efficiency = np.concatenate((self._efficiency, np.zeros(grown)))
                self._able = np.concatenate((self._able, np.zeros(grown, dtype=np.bool_)))
                self._slim = np.concatenate((self._slim, np.zeros(grown, dtype=np.bool_)))
        place = self._free.pop()
        checkpoint.note = place
        self._held[place] = checkpoint
        self._used[place] = now
        self._touch_around(checkpoint.node)

    def update(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        del now
        self._changed[checkpoint] = None

    def reconsider(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        self.update(checkpoint, now)

    def consume(self, checkpoint: Checkpoint, now: int) -> None:
        """O(1)."""
        checkpoint.used = now
        checkpoint.hits += 1
        if isinstance(checkpoint.note, int):
            self._used[checkpoint.note] = now

    def lose(self, checkpoint: Checkpoint, now: int) -> None:
        """O(edges to its neighbours)."""
        del now
        place = checkpoint.note
        assert isinstance(place, int)
        self._held[place] = checkpoint.note = None
        self._able[place] = False
        self._free.append(place)
        self._touch_around(checkpoint.node)

    def forget(self, checkpoint: Checkpoint) -> None:
        """O(1)."""
        if isinstance(checkpoint.note, int):  # a flush
            self._able[checkpoint.note] = False
        checkpoint.note = None

    def victim(self, now: int) -> Checkpoint | None:
        """O(checkpoints), vectorised; the earliest kept among equals."""
        del now
        for checkpoint in self._changed:
            self._look_at(checkpoint)
        self._changed.clear()
        places = np.flatnonzero(self._able & self._slim)
        if not len(places):  # all that is left branches to running requests
            places = np.flatnonzero(self._able)
        if not len(places):
            return None
        score = _scaled(self._used[places])
        if self.alpha:
            score = score + self.alpha * _scaled(self._efficiency[places])
        self.victims += 1
        return self._held[int(places[score.argmin()])]

    def _look_at(self, checkpoint: Checkpoint) -> None:
        place, node = checkpoint.note, checkpoint.node
        if not isinstance(place, int):
            return
        self._able[place] = checkpoint.evictable
        self._slim[place] = node.resident_children <= 1
        parent = 0 if node.parent is None else node.parent.end
        saved = self._costs.recompute(parent, node.end)
        held = self._costs.state_bytes + self._costs.token_bytes * (node.end - parent)
        self._efficiency[place] = saved / held

    def _touch_around(self, node: Node) -> None:
        """The node, the next one above and the next ones below that have a state."""
        above = node.parent
        while above is not None and above.checkpoint is None:
            above = above.parent
        stack = list(node.children.values())
        for one in (node, above):
            if one is not None and one.checkpoint is not None:
                self._changed[one.checkpoint] = None
        while stack:
            below = stack.pop()
            if below.checkpoint is not None:
                self._changed[below.checkpoint] = None
            else:
                stack.extend(below.children.values())


def _scaled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros(len(values))


class Marconi:
    """The tree under `FlopAware`, and the one search for its alpha."""

    name = "marconi"

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.policy = FlopAware(setup.model.costs, 0.0)
        self.server: Ours = plain(setup, self.policy, KINDS)
        self.seen: list[Request] = []
        self._decide_at: int | None = None  # requests
        self.tuned = False

    def begin(self, request: Request) -> int | None:
        """Match, pin, evict, take."""
        resumed = self.server.begin(request)
        if resumed is not None and not self.tuned:
            self.seen.append(request)
            if self._decide_at is None and self.policy.victims:
                self._decide_at = len(self.seen) * (1 + WINDOW)
            if len(self.seen) == self._decide_at:
                self.policy.alpha = best_alpha(self._setup, self.seen)
                self.tuned = True
                self.seen.clear()
        return resumed

    def extend(self, request: Request, up_to: int) -> bool:
        """Publish the states that the chunk left."""
        return self.server.extend(request, up_to)

    def finish(self, request: Request) -> None:
        """The live state becomes that of the last decoded token."""
        self.server.finish(request)

    def counters(self) -> dict[str, int]:
        """The tree's, and alpha in hundredths (-1: nothing was searched)."""
        return self.server.counters() | {
            "alpha_percent": round(100 * self.policy.alpha) if self.tuned else -1
        }


def best_alpha(setup: Setup, requests: Sequence[Request]) -> float:
    """The lowest alpha under which these requests, one by one, save most FLOPs."""
    unit = requests[0].block_size
    model = setup.model
    coarse = replace(
        setup,
        model=replace(
            model,
            token_bytes=model.token_bytes * unit,
            token_flops=model.token_flops * unit,
            pair_flops=model.pair_flops * unit * unit,
        ),
    )
    scaled = [_in_blocks(request) for request in requests]
    saved = []
    for alpha in ALPHAS:
        server = plain(coarse, FlopAware(coarse.model.costs, alpha), KINDS)
        total = 0.0
        for request in scaled:
            resumed = server.begin(request)
            if resumed is not None:
                total += coarse.model.flops(0, resumed)
                for up_to in (request.prompt_len, request.computed_len):
                    server.extend(request, up_to)
                server.finish(request)
        saved.append(total)
    return ALPHAS[saved.index(max(saved))]


def _in_blocks(request: Request) -> Request:
    """The request with a block as its unit; the last one of the answer is never computed."""
    unit = request.block_size
    prompt = -(-request.prompt_len // unit)
    whole = max(prompt, request.computed_len // unit)
    return replace(
        request,
        prompt_len=prompt,
        output_len=whole - prompt + 1,
        boundaries=(),
        ids=request.ids[: whole + 1],
        block_size=1,
    )


def make(setup: Setup) -> Marconi:
    """Build it."""
    return Marconi(setup)
