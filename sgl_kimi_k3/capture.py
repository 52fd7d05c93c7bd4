"""Which states a prefill leaves, and the slots they are written to.

A request's stops are planned at admission.  A state at a stop is captured in one of two ways:

- inside a pass: the KDA kernel writes any number of states per request and forward, at multiples of
  its own chunk from where the forward starts (`state_pass`).  A stop in between is moved up to the
  next such place; nothing is cut.
- at the end of a chunk, where no kernel can do that: the chunk is cut there, and the live state is
  copied right behind the forward, on its stream.  So is the state at the very end of a prompt.

A captured slot is the request's until a commit publishes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radix import Kind
from radix.tokens import common_len
from sgl_kimi_k3.arena import NO_IDS
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang.srt.managers.schedule_batch import Req

    from radix import PrefixCache
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.boundaries import BoundaryRule


_FIRST = (Kind.PROMPT_END, Kind.JUNCTION, Kind.BOUNDARY, Kind.INTERVAL)


@dataclass(frozen=True, slots=True)
class Capture:
    """A state slot that the launched chunk fills."""

    depth: int
    slot: int
    kind: Kind


class Captures:
    """Plans stops, and takes and holds the slots of running requests.

    Args:
        cache: the tree, for stops and for room.
        arena: where slots come from.
        rule: message ends, or None.
        kernel_chunk: the KDA kernel's chunk if it writes states inside a pass, else 0.
        grid: smallest gain, in tokens, worth waiting for another request's state.
        step_blocks: blocks that one decode step of all requests may need.
        flush_held_frees: frees states the scheduler still holds in a free group.
    """

    def __init__(  # documented on the class
        self,
        cache: PrefixCache,
        arena: Arena,
        *,
        rule: BoundaryRule | None,
        kernel_chunk: int,
        grid: int,
        step_blocks: int,
        flush_held_frees: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._rule = rule
        self.kernel_chunk = kernel_chunk
        self._grid = grid
        self._step_blocks = step_blocks
        self._flush_held_frees = flush_held_frees
        self.uncommitted: list[Req] = []  # requests that hold captures, oldest first

    # -- planning --

    def plan(self, req: Req) -> None:
        """Plan the stops of a matched, not yet admitted request.  Nothing is taken or counted."""
        tokens = tokens_of(req.full_untruncated_fill_ids)
        if req.last_node is None:
            req.last_node = self._cache.match(tokens, namespace_of(req), limit=0)
        boundaries = () if self._rule is None else self._rule.boundaries(tokens)
        stops = self._cache.stops(
            req.last_node, start=req.prefix_len, prompt_len=len(tokens), boundaries=boundaries
        )
        req.kimi_k3_stops = {stop.depth: stop.kind for stop in stops}

    def next_cut(self, req: Req, *, limit: int, only_firm: bool) -> int | None:
        """First depth in (prefix_len, limit) at which the coming chunk of `req` must end.

        `only_firm` leaves out the opportunistic ones.  None where states are written inside a pass.
        """
        if self.kernel_chunk:
            return None
        return min(
            (
                depth
                for depth, kind in req.kimi_k3_stops.items()
                if req.prefix_len < depth < limit and not (only_firm and kind is Kind.OPPORTUNISTIC)
            ),
            default=None,
        )

    def worth_waiting(self, leader: Req, req: Req) -> bool:
        """Whether `leader` is about to leave a state that `req` can resume.

        True if one of the states it holds or plans lies on the prefix both share and saves `req` a
        grid step.
        """
        depths = [capture.depth for capture in self._held(leader)]
        depths += [depth for depth in leader.kimi_k3_stops if depth > leader.prefix_len]
        if not depths or namespace_of(leader) != namespace_of(req):
            return False
        ours, theirs = req.full_untruncated_fill_ids, leader.full_untruncated_fill_ids
        near = slice(req.prefix_len, req.prefix_len + self._grid)
        if ours[near] != theirs[near]:
            return False  # the usual case, for little
        limit = min(len(ours) - 1, len(theirs), max(depths))
        shared = common_len(tokens_of(ours[:limit]), tokens_of(theirs[:limit]))
        gain = max((depth for depth in depths if depth <= shared), default=0) - req.prefix_len
        return gain >= self._grid

    # -- taking slots, before the forward is launched --

    def at_end(self, req: Req) -> tuple[int, int] | None:
        """If the chunk ends on a stop: (live state, slot to copy it to behind the forward).

        Best effort: without memory the chunk runs all the same and nothing is kept.  A prompt's end
        that the kernel can write is left to it, a step earlier: from there the same prompt can be
        resumed too.
        """
        kind: Kind | None = req.kimi_k3_stops.get(req.extend_end)
        if kind is None or (self.kernel_chunk and kind is Kind.PROMPT_END):
            return None
        taken = self._take(req, [(req.extend_end, kind)])
        return (self._arena.slots.read_one(req.kv.mamba_pool_idx), taken[0].slot) if taken else None

    def inside(self, req: Req) -> list[Capture]:
        """The states the kernel shall write inside the chunk.  Optional ones never evict."""
        if not self.kernel_chunk:
            return []
        places = self._places(req, req.prefix_len, req.extend_end)
        for capture in self._held(req):
            places.pop(capture.depth, None)
        firm = [one for one in places.items() if one[1] is not Kind.OPPORTUNISTIC]
        optional = [one for one in places.items() if one[1] is Kind.OPPORTUNISTIC]
        # Short of memory the prompt's end is worth most, a state on the grid least.
        firm.sort(key=lambda one: (_FIRST.index(one[1]), -one[0]))
        return self._take(req, firm) + self._take(req, optional)

    def _places(self, req: Req, start: int, end: int) -> dict[int, Kind]:
        """Where the kernel can write in a chunk [start, end), and the strongest reason to."""
        places: dict[int, Kind] = {}
        for depth, kind in req.kimi_k3_stops.items():
            inner = min(depth, end - 1) if kind is Kind.PROMPT_END else depth
            place = inner - (inner - start) % self.kernel_chunk
            if start < place < end and depth <= end:
                known = places.get(place, Kind.OPPORTUNISTIC)
                places[place] = kind if known is Kind.OPPORTUNISTIC else known
        return places

    @staticmethod
    def _held(req: Req) -> list[Capture]:
        return req.__dict__.get("kimi_k3_captures", [])

    def _take(self, req: Req, wanted: list[tuple[int, Kind]]) -> list[Capture]:
        """Slots for states at these depths, all optional or none of them; the first come first."""
        if not wanted:
            return []
        self._flush_held_frees()
        slots: list[int] = []
        if all(kind is Kind.OPPORTUNISTIC for _, kind in wanted):
            slots += self._spare_slots(len(wanted))
        else:
            # A commit makes these evictable; until then the next step of every request must fit.
            while len(slots) < len(wanted) and self._cache.fits(1, self._step_blocks):
                grant = self._cache.acquire(1, 0)
                assert grant is not None, "the cache refused what it said would fit"
                slots += grant.states.tolist()
        taken = [
            Capture(depth, slot, kind) for (depth, kind), slot in zip(wanted, slots, strict=False)
        ]
        for depth, kind in wanted[len(taken) :]:
            self._cache.counters.skipped[kind] += 1
            req.__dict__.setdefault("kimi_k3_refused", []).append(depth)
        if taken:
            held = req.__dict__.setdefault("kimi_k3_captures", [])
            if not held:
                self.uncommitted.append(req)
            held += taken
        return taken

    def _spare_slots(self, count: int) -> list[int]:
        """All or nothing, evicting nothing, while some states stay free."""
        if not self._arena.fits(count + OPTIONAL_RESERVE_STATES, 0):
            return []
        grant = self._arena.alloc(count, 0, overwritten=True)
        assert grant is not None, ("the pool refused what it said would fit", count)
        return grant.states.tolist()

    # -- giving them on or back --

    def collect(self, req: Req) -> list[Capture]:
        """Hand over what the request holds; it holds nothing afterwards."""
        held = req.__dict__.pop("kimi_k3_captures", [])
        if held:
            self.uncommitted = [other for other in self.uncommitted if other is not req]
        return held

    @staticmethod
    def collect_refused(req: Req) -> list[int]:
        """Hand over the depths at which no slot could be had since the last commit."""
        return req.__dict__.pop("kimi_k3_refused", [])

    def drop(self, req: Req) -> None:
        """Free what the request holds."""
        self.free(capture.slot for capture in self.collect(req))

    def free(self, slots: Iterable[int]) -> None:
        """Free state slots."""
        ids = np.fromiter(slots, dtype=np.int64)
        if ids.size:
            self._arena.free(ids, NO_IDS)


# Free states that must remain before opportunistic ones are taken.
OPTIONAL_RESERVE_STATES = 8
