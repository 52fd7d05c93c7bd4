"""Which states a prefill leaves, and the slots they are written to.

A request's stops are planned at admission.  A state at a stop is captured in one of two ways:

- at the end of a chunk: the chunk is cut there, and the live state is copied right behind the
  forward, on its stream;
- inside a chunk: the KDA kernel itself writes one state per request and forward, at a multiple of
  its own chunk from where the forward starts (SGLang's track fields, `inside`).  It costs no cut.

A captured slot is the request's until a commit publishes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True)
class Capture:
    """A state slot that the launched chunk fills."""

    depth: int
    slot: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Inside:
    """A state that the kernel writes inside a chunk: at `depth`, into `slot`."""

    depth: int
    slot: int


class Captures:
    """Plans stops, and takes and holds the slots of running requests.

    Args:
        cache: the tree, for stops and for room.
        arena: where slots come from.
        rule: message ends, or None.
        kernel_chunk: the KDA kernel's chunk if it can write a state inside one, else 0.
        grid: smallest gain, in tokens, worth waiting for another request's state.
        make_room: frees states the scheduler still holds in a free group.
    """

    def __init__(  # documented on the class
        self,
        cache: PrefixCache,
        arena: Arena,
        *,
        rule: BoundaryRule | None,
        kernel_chunk: int,
        grid: int,
        flush_held_frees: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._rule = rule
        self.kernel_chunk = kernel_chunk
        self._grid = grid
        self._flush_held_frees = flush_held_frees

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

        `only_firm` leaves out the opportunistic ones.  A single firm stop that the kernel can
        write inside the chunk needs no cut.
        """
        stops: dict[int, Kind] = req.kimi_k3_stops
        firm = sorted(
            depth
            for depth, kind in stops.items()
            if req.prefix_len < depth < limit and kind is not Kind.OPPORTUNISTIC
        )
        if len(firm) == 1 and self._reachable_inside(req, firm[0]):
            firm = []
        optional = () if only_firm else (d for d in stops if req.prefix_len < d < limit)
        loose = (d for d in optional if stops[d] is Kind.OPPORTUNISTIC)
        return min([*firm, *loose], default=None)

    def worth_waiting(self, leader: Req, req: Req) -> bool:
        """Whether `leader`, whose prefill is unfinished, will leave a state that `req` can resume.

        True if one of its coming stops lies on the prefix both share and saves `req` a grid step.
        """
        stops = [depth for depth in leader.kimi_k3_stops if depth > leader.prefix_len]
        if not stops or namespace_of(leader) != namespace_of(req):
            return False
        ours, theirs = req.full_untruncated_fill_ids, leader.full_untruncated_fill_ids
        limit = min(len(ours) - 1, len(theirs), max(stops))
        shared = common_len(tokens_of(ours[:limit]), tokens_of(theirs[:limit]))
        gain = max((depth for depth in stops if depth <= shared), default=0) - req.prefix_len
        return gain >= self._grid

    # -- taking slots, before the forward is launched --

    def at_end(self, req: Req) -> tuple[int, int] | None:
        """If the chunk ends on a stop: (live state, slot to copy it to behind the forward).

        Best effort: without memory the chunk runs all the same and nothing is kept.
        """
        kind: Kind | None = req.kimi_k3_stops.get(req.extend_end)
        slot = None if kind is None else self._take_slot(req, req.extend_end, kind)
        return None if slot is None else (self._arena.slots.read_one(req.kv.mamba_pool_idx), slot)

    def inside(self, req: Req) -> Inside | None:
        """The one state the kernel shall write inside the chunk, if any.

        The deepest firm stop it can reach.  Else, in a prompt's last chunk, the deepest depth from
        which the same prompt can be resumed again; before it, an opportunistic stop; both only
        while memory is free.
        """
        if not self.kernel_chunk:
            return None
        stops: dict[int, Kind] = req.kimi_k3_stops
        planned = {
            depth: kind
            for depth, kind in stops.items()
            if req.prefix_len < depth < req.extend_end and self._reachable_inside(req, depth)
        }
        firm = [depth for depth, kind in planned.items() if kind is not Kind.OPPORTUNISTIC]
        if firm:
            depth = max(firm)
        elif req.extend_end == len(req.full_untruncated_fill_ids):
            steps = (req.extend_end - 1 - req.prefix_len) // self.kernel_chunk
            depth = req.prefix_len + steps * self.kernel_chunk
        else:
            depth = max(planned, default=req.prefix_len)
        kind = planned.get(depth, Kind.OPPORTUNISTIC)
        if depth == req.prefix_len or depth in self._held_depths(req):
            return None
        if not firm and not self._arena.fits(OPTIONAL_RESERVE_STATES, 0):
            return None
        slot = self._take_slot(req, depth, kind)
        return None if slot is None else Inside(depth, slot)

    @staticmethod
    def _held_depths(req: Req) -> list[int]:
        return [capture.depth for capture in req.__dict__.get("kimi_k3_captures", ())]

    def _reachable_inside(self, req: Req, depth: int) -> bool:
        return bool(self.kernel_chunk) and (depth - req.prefix_len) % self.kernel_chunk == 0

    def _take_slot(self, req: Req, depth: int, kind: Kind) -> int | None:
        """A slot for a state at `depth`; an opportunistic state never evicts anything."""
        self._flush_held_frees()
        optional = kind is Kind.OPPORTUNISTIC
        grant = self._arena.alloc(1, 0) if optional else self._cache.acquire(1, 0)
        if grant is None:
            self._cache.counters.skipped[kind] += 1
            req.__dict__.setdefault("kimi_k3_refused", []).append(depth)
            return None
        slot = int(grant.states[0])
        held = req.__dict__.setdefault("kimi_k3_captures", [])
        held.append(Capture(depth, slot, kind))
        return slot

    # -- giving them on or back --

    def collect(self, req: Req) -> list[Capture]:
        """Hand over what the request holds; it holds nothing afterwards."""
        return req.__dict__.pop("kimi_k3_captures", [])

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


# Free states that must remain before an unplanned opportunistic one is taken.
OPTIONAL_RESERVE_STATES = 8


def track(batch: Any, inside: list[Inside | None]) -> None:
    """Fill SGLang's track fields of an extend batch, so that the KDA backend writes these states.

    A position inside a chunk is named by `depth + 1`: the backend reads an aligned length as "the
    final state" (`ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`, `_force_track_h`).
    """
    if not any(inside):
        return
    from mempool.storage import upload  # noqa: PLC0415  # the planner above needs no torch

    device = batch.tree_cache.arena.device
    mask = [one is not None for one in inside]
    lengths = [0 if one is None else one.depth + 1 for one in inside]
    slots = [0 if one is None else one.slot for one in inside]
    batch.mamba_prefill_track_mask_cpu = mask
    batch.mamba_track_seqlens_cpu = lengths
    batch.mamba_track_indices = upload(np.array(slots, dtype=np.int64), device)
    batch.mamba_track_mask = upload(np.array(mask), device)
    batch.mamba_track_seqlens = upload(np.array(lengths, dtype=np.int64), device)
