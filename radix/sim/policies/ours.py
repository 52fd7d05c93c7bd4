"""The server's own tree and pool: `PrefixCache` over `mempool.Pool`, driven through `Lease`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool import Pool
from radix import CacheConfig, EvictionPolicy, Kind, Lease, PrefixCache, TokenArray, admit

if TYPE_CHECKING:
    from radix.sim.server import Setup
    from radix.sim.trace import Request

RESERVED_STATES = 2  # with the next, what the server keeps clear of opportunistic states
RESERVED_SHARE = 8


@dataclass(slots=True)
class _Running:
    lease: Lease
    tokens: TokenArray


class Ours:
    """As the server: room for the prompt, its answer and one state from admission on.

    `policy` orders the victims, None: as shipped; a prefill leaves states of `kinds` only.
    """

    name = "ours"

    def __init__(
        self,
        setup: Setup,
        policy: EvictionPolicy | None = None,
        kinds: frozenset[Kind] = frozenset(Kind),
    ) -> None:
        self._kinds = kinds
        geometry = setup.model.geometry(setup.capacity_bytes, setup.block_size)
        self.pool = Pool(geometry)
        self.cache = PrefixCache(
            self.pool,
            CacheConfig(
                block_size=setup.block_size,
                grid=setup.grid,
                interval=setup.interval,
                opportunistic=setup.opportunistic,
                dense=setup.dense,
                probation=setup.probation,
                ghost_tokens=setup.ghost_tokens,
                reserve_states=RESERVED_STATES,
                reserve_blocks=geometry.max_blocks // RESERVED_SHARE,
                costs=setup.model.token_costs,
            ),
            policy,
        )
        self._running: dict[Request, _Running] = {}
        self._asked: tuple[Request, TokenArray] | None = None  # the last one's, it may come again

    def begin(self, request: Request) -> int | None:
        """Match, pin, evict, take."""
        if self._asked is None or self._asked[0] is not request:
            self._asked = request, request.tokens()[: request.computed_len]
        tokens = self._asked[1]
        lease = admit(
            self.cache,
            self.pool,
            tokens[: request.prompt_len],
            None,
            boundaries=request.boundaries[:1],
            room_len=request.computed_len,
        )
        if lease is None:
            return None
        lease.stops = tuple(stop for stop in lease.stops if stop.kind in self._kinds)
        self._asked = None
        self._running[request] = _Running(lease, tokens)
        return lease.match.resume_len

    def extend(self, request: Request, up_to: int) -> bool:
        """Publish the states that the chunk left."""
        running = self._running[request]
        lease = running.lease
        for stop in [stop for stop in lease.stops if stop.depth <= up_to]:
            lease.take(stop)
        if lease.offers:
            lease.commit(running.tokens[:up_to])
        return True

    def finish(self, request: Request) -> None:
        """The live state becomes the turn's end."""
        running = self._running.pop(request)
        running.lease.finish(running.tokens, self._turn_end(request))

    def _turn_end(self, request: Request) -> int | None:
        """Where the live state stands."""
        return request.computed_len

    def counters(self) -> dict[str, int]:
        """The cache's report, flat, and the pool's moves."""
        report = self.cache.report()
        pool = self.pool.report().counters
        totals = {"states": report.states, "blocks": report.blocks, "moves": pool.moves}
        for name, counts in (
            ("taken", report.taken),
            ("evicted", report.evicted),
            ("skipped", report.skipped),
            ("hit_tokens", report.hit_tokens),
            ("lost_tokens", report.lost_tokens),
        ):
            totals |= {f"{name}_{key.value}": counts[key] for key in counts if counts[key]}  # type: ignore[index]
        return totals


def make(setup: Setup) -> Ours:
    """The shipped policy."""
    return Ours(setup)
