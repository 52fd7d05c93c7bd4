"""One request's life over the cache, for the simulator and tests: admit, extend, commit, finish.

Regions of [0, allocated): the tree's up to the block in which pin.depth lies, private from there
on. If the prompt resumes inside a block, its rows up to there are copied into the first private
one. A state is taken for a stop just before it is filled and handed to the tree by the next
commit; inside a block it brings a copy of the request's block, its tail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix.tokens import NO_IDS, IdArray, TokenArray
from radix.values import Kind, Match, Offer, Pin, SlotId, Stop

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from radix.cache import PrefixCache
    from radix.ports import PoolPort


class Lease:
    """What one running request holds. Made by `admit`; `finish` exactly once."""

    __slots__ = (
        "blocks",
        "cache",
        "few",
        "live",
        "match",
        "namespace",
        "offers",
        "pin",
        "pool",
        "refused",
        "stops",
    )

    def __init__(
        self,
        *,
        cache: PrefixCache,
        pool: PoolPort,
        match: Match,
        pin: Pin,
        live: SlotId,
        blocks: IdArray,
        stops: tuple[Stop, ...],
    ) -> None:
        self.cache = cache
        self.pool = pool
        self.namespace = match.namespace
        self.match = match
        self.pin: Pin | None = pin
        self.live: SlotId | None = live
        self.blocks = blocks  # private, from the one in which pin.depth lies
        self.stops = stops  # still ahead
        self.offers: list[Offer] = []  # filled or about to be, not yet committed
        self.refused: list[int] = []  # depths of stops that found no room, not yet committed
        self.few = cache.few  # opportunistic states it may still leave at the cost of others

    def _open(self) -> Pin:
        if self.pin is None:
            raise ValueError("the lease is finished")
        return self.pin

    def extend(self, up_to: int) -> bool:
        """Hold private blocks up to `up_to`; False: no room, nothing changed."""
        pin = self._open()
        size = self.cache.config.block_size
        missing = -(-up_to // size) - pin.depth // size - len(self.blocks)
        if missing <= 0:
            return True
        grant = self.cache.acquire(0, missing)
        if grant is None:
            return False
        self.blocks = np.concatenate((self.blocks, grant.blocks))
        return True

    def take(self, stop: Stop) -> SlotId | None:
        """A state to write at `stop`; None: no room, so that checkpoint is skipped.

        An opportunistic one evicts surplus ones, and a few of a prompt anyone.
        """
        self._open()
        self.stops = tuple(other for other in self.stops if other.depth > stop.depth)
        tails = int(stop.depth % self.cache.config.block_size > 0)
        may = stop.kind is not Kind.OPPORTUNISTIC or self._make_room(tails)
        grant = self.cache.acquire(1, tails) if may else None
        if grant is None:
            self.cache.counters.skipped[stop.kind] += 1
            self.refused.append(stop.depth)
            return None
        slot = SlotId(int(grant.states[0]))
        tail = int(grant.blocks[0]) if tails else None
        self.offers.append(Offer(stop.depth, slot, stop.kind, tail))
        return slot

    def _make_room(self, tails: int) -> bool:
        """For an opportunistic state."""
        if self.cache.evict_surplus(1, tails):
            return True
        may = self.few > 0 and self.cache.evict_for_few(1, tails)
        self.few -= may
        return may

    def commit(self, tokens: TokenArray) -> None:
        """Publish the states taken so far, all of them written; `tokens` are those computed."""
        self._publish(self._open(), tokens, finished=False)

    def _publish(self, pin: Pin, tokens: TokenArray, *, finished: bool) -> None:
        size = self.cache.config.block_size
        first = pin.depth // size
        done = self.cache.commit(
            pin,
            tokens,
            self.namespace,
            self.blocks[: len(tokens) // size - first],
            self.offers,
            finished=finished,
            refused=self.refused,
        )
        self.offers, self.refused = [], []
        spare = [
            self.blocks[start // size - first : stop // size - first]
            for start, stop in done.duplicates
        ]
        tails = np.array(done.spare, dtype=np.int64)
        self.pool.free(np.array(done.refused, dtype=np.int64), np.concatenate([tails, *spare]))
        self.blocks = self.blocks[done.kept_len // size - first :]
        self.pin = done.pin

    def finish(self, tokens: TokenArray, turn_end: int | None = None) -> None:
        """Publish what is valid and let everything go.

        `turn_end` is the depth at which the live state stands, if it is worth keeping; inside a
        block only in the last one. Raises ValueError if the lease is finished already.
        """
        pin = self._open()
        if turn_end is not None and self.live is not None:
            depths = {offer.depth for offer in self.offers}
            if turn_end > pin.depth and turn_end not in depths:
                self.offers.append(self._turn_end(pin, turn_end, len(tokens)))
                self.live = None
        self._publish(pin, tokens, finished=True)
        self._free_private()

    def _turn_end(self, pin: Pin, depth: int, end: int) -> Offer:
        """The live state and, inside a block, the request's own last block."""
        assert self.live is not None
        size = self.cache.config.block_size
        tail = None
        if depth % size:
            if depth // size != end // size:
                raise ValueError(f"a turn's end at {depth} is not in the last block of {end}")
            number = depth // size - pin.depth // size
            tail = int(self.blocks[number])
            self.blocks = np.delete(self.blocks, number)
        return Offer(depth, self.live, Kind.TURN_END, tail)

    def abort(self) -> None:
        """Let everything go, publishing nothing that was not committed."""
        pin = self._open()
        self.pin = None
        self.cache.unpin(pin)
        self._free_private()

    def _free_private(self) -> None:
        slots = [offer.slot for offer in self.offers]
        tails = [offer.tail for offer in self.offers if offer.tail is not None]
        if self.live is not None:
            slots.append(self.live)
        blocks = np.concatenate((self.blocks, np.array(tails, dtype=np.int64)))
        self.pool.free(np.array(slots, dtype=np.int64), blocks)
        self.offers, self.live, self.blocks = [], None, NO_IDS


def admit(
    cache: PrefixCache,
    pool: PoolPort,
    tokens: TokenArray,
    namespace: Hashable,
    *,
    boundaries: Sequence[int] = (),
    room_len: int = 0,
) -> Lease | None:
    """Match, pin, evict until it fits, take the live state and the prompt's blocks.

    Blocks are taken up to `room_len` if that is longer. None: no room now; everything is as it was.
    """
    match = cache.match(tokens, namespace)
    stops = cache.stops(
        match, start=match.resume_len, prompt_len=len(tokens), boundaries=boundaries
    )
    size = cache.config.block_size
    pin = cache.pin(match)
    grant = cache.acquire(1, -(-max(len(tokens), room_len) // size) - match.resume_len // size)
    if grant is None:
        cache.unpin(pin)
        return None
    cache.touch(pin)
    cache.record(match)
    cache.relax(pin)  # the live state starts as its copy
    return Lease(
        cache=cache,
        pool=pool,
        match=match,
        pin=pin,
        live=SlotId(int(grant.states[0])),
        blocks=grant.blocks,
        stops=stops,
    )
