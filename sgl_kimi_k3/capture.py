"""Which states a prefill leaves, and the slots they are written to.

A request's stops are planned at admission.  A state at a stop is captured in one of two ways:

- inside a pass: the KDA kernel writes any number of states per request and forward, at multiples of
  its own chunk from where the forward starts (`state_pass`).  A stop in between is moved up to the
  next such place; nothing is cut.
- at the end of a chunk, where no kernel can do that: the chunk is cut there, and the live state is
  copied right behind the forward, on its stream.  So is the state at the very end of a prompt.

Where a state stands inside a KV block, the block is copied with it, also behind the forward: the
request goes on writing its own.  Both copies are the request's until a commit publishes them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radix import Kind
from radix.tokens import common_len
from sgl_kimi_k3.followers import near, worth_a_state
from sgl_kimi_k3.keys import namespace_of, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sglang.srt.managers.schedule_batch import Req

    from radix import PrefixCache
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.boundaries import BoundaryRule
    from sgl_kimi_k3.rows import RequestRows


logger = logging.getLogger(__name__)

_FIRST = (Kind.PROMPT_END, Kind.JUNCTION, Kind.BOUNDARY, Kind.INTERVAL)


@dataclass(frozen=True, slots=True)
class Capture:
    """A state slot that the launched chunk fills, and, inside a block, a block for the KV."""

    depth: int
    slot: int
    kind: Kind
    tail: int | None = None


Pairs = list[tuple[int, int]]  # ids: copy the first to the second


@dataclass(frozen=True, slots=True)
class Copies:
    """What is to be copied right behind a forward."""

    states: Pairs
    blocks: Pairs


class Captures:
    """Plans stops, and takes and holds the slots of running requests.

    Args:
        cache: the tree, for stops and for room.
        arena: where slots and blocks come from.
        rows: the requests' own blocks.
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
        rows: RequestRows,
        *,
        rule: BoundaryRule | None,
        kernel_chunk: int,
        grid: int,
        step_blocks: int,
        flush_held_frees: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._rows = rows
        self._rule = rule
        self.kernel_chunk = kernel_chunk
        self._grid = grid
        self._step_blocks = step_blocks
        self._flush_held_frees = flush_held_frees
        self.uncommitted: list[Req] = []  # requests that hold captures, oldest first
        self.waiting: Sequence[Req] = ()  # SGLang's queue, as of the pass that is planned

    # -- planning --

    def plan(self, req: Req) -> None:
        """Plan the stops of a matched, not yet admitted request.  Nothing is taken or counted.

        One that SGLang bars from the tree leaves nothing.  If it asked for no match either, its KV
        is not determined by its tokens, and it knows nothing: it gets a namespace of its own.
        """
        tokens = tokens_of(req.full_untruncated_fill_ids)
        barred = req.skip_radix_cache_insert
        if req.last_node is None:
            own = (req.rid,) if barred else ()
            req.last_node = self._cache.match(tokens, (*namespace_of(req), *own), limit=0)
        req.kimi_k3_stops = {}
        if barred:
            return
        boundaries = () if self._rule is None else self._rule.boundaries(tokens)
        stops = self._cache.stops(
            req.last_node, start=req.prefix_len, prompt_len=len(tokens), boundaries=boundaries
        )
        req.kimi_k3_stops = {stop.depth: stop.kind for stop in stops}
        req.__dict__.setdefault("kimi_k3_few", self._cache.few)  # a retraction brings no new ones
        proven = worth_a_state(req, self.waiting, self._grid)
        if proven is not None and not self._is_firm(req, proven):
            req.kimi_k3_stops[proven] = Kind.JUNCTION

    @staticmethod
    def _is_firm(req: Req, depth: int) -> bool:
        return req.kimi_k3_stops.get(depth, Kind.OPPORTUNISTIC) is not Kind.OPPORTUNISTIC

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

        True if one of the states it holds or plans lies on the prefix both share, no deeper than
        `req` may resume, and saves it a grid step.
        """
        if req.last_node is None:
            return False  # it resumes nothing in any case
        depths = [capture.depth for capture in self._held(leader)]
        depths += [depth for depth in leader.kimi_k3_stops if depth > leader.prefix_len]
        if not depths or namespace_of(leader) != namespace_of(req):
            return False
        ours, theirs = req.full_untruncated_fill_ids, leader.full_untruncated_fill_ids
        if not near(ours, theirs, req.prefix_len, self._grid):
            return False  # the usual case, for little
        limit = min(req.last_node.limit, len(theirs), max(depths))
        shared = common_len(tokens_of(ours, limit), tokens_of(theirs, limit))
        gain = max((depth for depth in depths if depth <= shared), default=0) - req.prefix_len
        return gain >= self._grid

    # -- taking slots, before the forward is launched --

    def at_end(self, req: Req) -> list[Capture]:
        """Where the live state goes if the chunk ends on a stop; to be copied behind the forward.

        Best effort: without memory the chunk runs all the same and nothing is kept.  A prompt's end
        that the kernel can write is left to it, a step earlier: from there the same prompt can be
        resumed too.
        """
        kind: Kind | None = req.kimi_k3_stops.get(req.extend_end)
        if kind is None or (self.kernel_chunk and kind is Kind.PROMPT_END):
            return []
        return self._take(req, [(req.extend_end, kind)])

    def inside(self, req: Req) -> list[Capture]:
        """The states the kernel shall write inside the chunk.

        Optional ones evict surplus ones, and a few of a prompt anyone.
        """
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

    def on_way(self, req: Req, depth: int, kind: Kind) -> Capture | None:
        """Where the live state goes if the coming decode step leaves it at `depth`.

        An optional one takes nothing that the next prompts will need, and nothing from their states
        that nobody used yet: those serve more, and evicting costs a decode step.
        """
        if req.skip_radix_cache_insert:
            return None
        req.kimi_k3_few = 0  # they were the prompt's
        tails = self._tails(depth)
        if kind is Kind.OPPORTUNISTIC and not self._cache.spare(1, tails, surplus=False):
            self._refuse(req, depth, kind)
            return None
        return next(iter(self._take(req, [(depth, kind)])), None)

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

    def holds(self, req: Req, one: Capture) -> bool:
        """Whether the request still holds what it took, neither published nor freed."""
        return any(held is one for held in self._held(req))

    def _take(self, req: Req, wanted: list[tuple[int, Kind]]) -> list[Capture]:
        """Memory for states at these depths, all optional or none; the first come first."""
        if not wanted:
            return []
        self._flush_held_frees()
        if all(kind is Kind.OPPORTUNISTIC for _, kind in wanted):
            taken = self._take_spare(req, wanted)
        else:
            taken = []
            for depth, kind in wanted:
                tails = self._tails(depth)
                # A commit makes these evictable; until then every request's next step must fit.
                if not self._cache.fits(1, self._step_blocks + tails):
                    break
                grant = self._cache.acquire(1, tails)
                assert grant is not None, "the cache refused what it said would fit"
                tail = int(grant.blocks[0]) if tails else None
                taken.append(Capture(depth, int(grant.states[0]), kind, tail))
        for depth, kind in wanted[len(taken) :]:
            self._refuse(req, depth, kind)
        if taken:
            held = req.__dict__.setdefault("kimi_k3_captures", [])
            if not held:
                self.uncommitted.append(req)
            held += taken
        return taken

    def _refuse(self, req: Req, depth: int, kind: Kind) -> None:
        """Note that there was no memory for it: what that costs later is told apart."""
        self._cache.counters.skipped[kind] += 1
        req.__dict__.setdefault("kimi_k3_refused", []).append(depth)

    def _take_spare(self, req: Req, wanted: list[tuple[int, Kind]]) -> list[Capture]:
        """All or nothing, as long as some stay that the next ones can have in the same way."""
        count, tails = len(wanted), sum(self._tails(depth) for depth, _ in wanted)
        if not self._make_room(req, count, tails):
            return []
        grant = self._arena.alloc(count, tails, overwritten=True)
        assert grant is not None, ("the pool refused what it said would fit", count, tails)
        blocks = iter(grant.blocks.tolist())
        return [
            Capture(depth, slot, kind, next(blocks) if self._tails(depth) else None)
            for (depth, kind), slot in zip(wanted, grant.states.tolist(), strict=True)
        ]

    def _make_room(self, req: Req, count: int, tails: int) -> bool:
        """For opportunistic states: surplus ones go, and anyone for the few of a prompt."""
        reserve = OPTIONAL_RESERVE_STATES
        if self._cache.evict_surplus(count, tails, reserve_states=reserve):
            return True
        few = req.__dict__.get("kimi_k3_few", 0)
        if count > few or not self._cache.evict_for_few(
            count, tails, reserve_states=reserve, reserve_blocks=self._step_blocks
        ):
            return False
        req.kimi_k3_few = few - count
        return True

    def _tails(self, depth: int) -> int:
        """Blocks that a state at `depth` brings."""
        return int(depth % self._arena.geometry.block_size > 0)

    def copies(
        self, reqs: Sequence[Req], ends: Sequence[list[Capture]], inside: Sequence[list[Capture]]
    ) -> Copies:
        """What must be copied behind the forward of `reqs` for what was taken."""
        states, blocks = [], []
        for req, end, within in zip(reqs, ends, inside, strict=True):
            live = self._arena.slots.read_one(req.kv.mamba_pool_idx) if end else 0
            states += [(live, one.slot) for one in end]
            blocks += [
                (self._rows.block_at(req.kv.req_pool_idx, one.depth - 1), one.tail)
                for one in (*end, *within)
                if one.tail is not None
            ]
        return Copies(states, blocks)

    def discard(
        self, reqs: Sequence[Req], inside: Sequence[list[Capture]], copies: Copies
    ) -> Copies:
        """The forward wrote none of `inside`: free them, so that nothing unwritten is published.

        Returns what is left to copy.
        """
        logger.error(
            "the KDA prefill that ran wrote none of the states it was asked for; they are not kept"
        )
        for req, within in zip(reqs, inside, strict=True):
            kept = [one for one in self.collect(req) if one not in within]
            if kept:
                req.kimi_k3_captures = kept
                self.uncommitted.append(req)
            self.free(within)
        tails = {one.tail for within in inside for one in within}
        return Copies(copies.states, [pair for pair in copies.blocks if pair[1] not in tails])

    # -- giving them on or back --

    def collect(self, req: Req, up_to: int | None = None) -> list[Capture]:
        """Hand over what the request holds, down to a depth; it goes on holding what is deeper."""
        held = req.__dict__.pop("kimi_k3_captures", [])
        deeper = [one for one in held if up_to is not None and one.depth > up_to]
        if deeper:
            req.kimi_k3_captures = deeper
        elif held:
            self.uncommitted = [other for other in self.uncommitted if other is not req]
        return [one for one in held if one not in deeper]

    @staticmethod
    def collect_refused(req: Req) -> list[int]:
        """Hand over the depths at which no slot could be had since the last commit."""
        return req.__dict__.pop("kimi_k3_refused", [])

    def drop(self, req: Req) -> None:
        """Free what the request holds."""
        self.free(self.collect(req))

    def free(self, captures: Iterable[Capture]) -> None:
        """Free what captures hold."""
        gone = tuple(captures)
        tails = [one.tail for one in gone if one.tail is not None]
        self.give_back([one.slot for one in gone], tails)

    def give_back(self, slots: Sequence[int], tails: Sequence[int]) -> None:
        """Free state slots and blocks."""
        if slots or tails:
            self._arena.free(np.array(slots, dtype=np.int64), np.array(tails, dtype=np.int64))


# States that must remain to be had in the same way when opportunistic ones are taken.
OPTIONAL_RESERVE_STATES = 8
