"""Who may ask for memory in a pass: under overload, strangers wait until it harms nobody.

`radix.Turnstile` decides; here SGLang's queue is what it decides about.  Only its default order,
first come first served, is touched: whoever asked for another, or for priorities, gets that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

from radix import Turnstile, Waiting, needed_by
from sgl_kimi_k3.budget import answer_tokens
from sgl_kimi_k3.keys import known_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from radix import Match, PrefixCache
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.room import Room

# Of the arena, what those who are away may keep from strangers: the rest is for who is here.
AWAY_SHARE = 2
# A stranger's look-up is repeated after so many ticks: others may have computed what he shares.
LOOK_AGAIN_TICKS = 16


class Gate:
    """Knows what every waiting request would resume, and holds back who should not ask yet.

    Args:
        cache: the tree.
        arena: the memory.
        room: what could be had of it.
        state_tokens: what a state costs in SGLang's budget.
        limit: admissions that may pass the first who is held back; 0: nobody is.
    """

    def __init__(
        self, cache: PrefixCache, arena: Arena, room: Room, *, state_tokens: int, limit: int
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._room = room
        self._state_tokens = state_tokens
        self._away_limit = arena.geometry.total_bytes // AWAY_SHARE
        self.turnstile = Turnstile(limit)
        self.held: list[Req] = []  # in the last pass
        self.short = False  # whether there was not room for all who wait
        self._decided_for: Hashable = None

    def hold_back(
        self, queue: list[Req], running: list[Req], unfinished: Req | None, ratio: float
    ) -> list[Req]:
        """Those of the queue that must not ask in this pass.

        `running` decode, `unfinished` is in the middle of its prefill; `ratio` is the share of
        their longest answers that running requests are expected to write.
        """
        rest = 0 if unfinished is None else _rest(unfinished)
        ended = self._cache.returns.ended
        waiting = tuple(req.rid for req in queue)
        situation = (self._cache.held.tick, ended, waiting, len(running), rest)
        if situation != self._decided_for:
            self._decided_for = situation
            self._decide(queue, running, rest, ratio)
        return self.held

    def _decide(self, queue: list[Req], running: list[Req], rest: int, ratio: float) -> None:
        for req in queue:
            req.__dict__.setdefault("kimi_k3_arrived", self._cache.held.tick)
        self.held = []
        promised = int(rest + sum(_expected_answer(req, ratio) for req in running))
        need = promised + sum(self._need(req, 0) for req in queue)  # if they resume nothing
        plain = need <= self._room_beside(self._away_limit)  # whoever is away
        room = 0 if plain else self._room_beside_those_away()
        self.short = not plain and need > room
        if not self.short:
            return
        waiting = self._look_at_all(queue)
        self.turnstile.hold_back(waiting, room=room - promised, idle=not running and not rest)
        self.held = [req for req, one in zip(queue, waiting, strict=True) if one.held]

    def admitted(self, queue: list[Req], left: list[Req]) -> None:
        """A pass over `queue`, for which there was not room, is over; `left` it was left."""
        remain = set(map(id, left))
        waiting = [req.kimi_k3_waiting for req in queue]
        gone = [
            one
            for req, one in zip(queue, waiting, strict=True)
            if id(req) not in remain and not one.held
        ]
        self.turnstile.admitted(waiting, gone)

    def due(self) -> list[Any]:
        """States whose conversations will probably go on soon; none if nobody is held back."""
        return list(self._cache.returns.due(self._cache.held.tick)) if self.turnstile.limit else []

    def came(self, req: Req) -> None:
        """The request was admitted for the first time; before its state counts as consumed."""
        arrived = req.__dict__.get("kimi_k3_arrived", self._cache.held.tick)
        self._cache.returns.came(req.lock.pin.turn, req.lock.node, arrived)

    def _room_beside_those_away(self) -> int:
        """Tokens that fit without what conversations need that will go on soon."""
        geometry = self._arena.geometry
        keep = needed_by(
            {**self._cache.held.expected, **dict.fromkeys(self.due())},
            state_bytes=geometry.state_bytes,
            block_bytes=geometry.block_bytes,
            limit=self._away_limit,
        )
        return self._room.reclaimable_blocks(*keep) * geometry.block_size

    def _room_beside(self, size: int) -> int:
        """Tokens that fit without that many bytes, whoever needs them."""
        geometry = self._arena.geometry
        blocks = self._room.reclaimable_blocks() - size // geometry.block_bytes
        return (blocks - 1) * geometry.block_size

    def _need(self, req: Req, resumed: int) -> int:
        """As `PrefillAdder.add_one_req` counts."""
        prompt = len(req.origin_input_ids) + len(req.output_ids)
        page = self._arena.geometry.block_size
        return prompt - resumed + answer_tokens(req) + page + self._state_tokens

    def _look_at_all(self, queue: list[Req]) -> list[Waiting]:
        """Every request's prospects; of strangers only the first is looked up in every tick."""
        found: list[Waiting] = []
        fresh = True
        for req in queue:
            one = self._look_at(req, fresh=fresh)
            fresh = fresh and not one.stranger
            found.append(one)
        return found

    def _look_at(self, req: Req, *, fresh: bool) -> Waiting:
        known, tick = req.__dict__, self._cache.held.tick
        one: Waiting | None = known.get("kimi_k3_waiting")
        if one is not None:
            match, looked_at = known["kimi_k3_looked"]
            again = tick - looked_at >= (1 if fresh else LOOK_AGAIN_TICKS)
            if self._holds(match) and not (one.stranger and again):
                return one
        match = known_of(req, self._cache)
        known["kimi_k3_looked"] = match, tick
        resumed = match.resume_len
        stranger = not req.output_ids and 2 * resumed < len(req.origin_input_ids)
        if one is None:
            one = known["kimi_k3_waiting"] = Waiting(0, stranger)
        one.need, one.stranger = self._need(req, resumed), stranger
        return one

    @staticmethod
    def _holds(match: Match) -> bool:
        """Whether the state that was found is still there."""
        if match.node is None:
            return True
        checkpoint = match.node.checkpoint
        return checkpoint is not None and checkpoint.slot == match.slot


def _expected_answer(req: Req, ratio: float) -> float:
    """Tokens that a running request will still write, as `PrefillAdder` expects."""
    return answer_tokens(req) * (1.0 if req.sampling_params.ignore_eos else ratio)


def _rest(req: Req) -> int:
    """Tokens that an unfinished prefill still takes, with its answer."""
    return len(req.full_untruncated_fill_ids) - req.prefix_len + answer_tokens(req)


def new_prefill(original: Callable[..., Any], scheduler: Any, running_batch: ScheduleBatch) -> Any:
    """AROUND `Scheduler.get_new_batch_prefill`: those held back are not in the queue meanwhile."""
    gate = gate_of(scheduler)
    if gate is None:
        return original(scheduler, running_batch)
    if not scheduler.waiting_queue:
        gate.held = []
        return original(scheduler, running_batch)
    queue, running = list(scheduler.waiting_queue), running_batch.reqs
    if running_batch.batch_is_full and running and scheduler.chunked_req is None:
        return original(scheduler, running_batch)  # which admits nobody
    ratio = scheduler.new_token_ratio_tracker.current
    held = gate.hold_back(queue, running, scheduler.chunked_req, ratio)
    if not gate.short:
        return original(scheduler, running_batch)
    away = set(map(id, held))
    scheduler.waiting_queue = [req for req in queue if id(req) not in away]
    plan = original(scheduler, running_batch)
    left = scheduler.waiting_queue
    gate.admitted(queue, left)
    stay, known = away | set(map(id, left)), set(map(id, queue))
    scheduler.waiting_queue = [req for req in queue if id(req) in stay]
    scheduler.waiting_queue += [req for req in left if id(req) not in known]
    return plan


def gate_of(scheduler: Any) -> Gate | None:
    """The gate, where it applies: our tree, and nobody asked for another order."""
    from sgl_kimi_k3.scheduler import keeps_states  # noqa: PLC0415  # it imports SGLang's adder

    if not keeps_states(scheduler.tree_cache):
        return None
    gate: Gate = scheduler.tree_cache.gate
    policy = scheduler.policy
    ordered = policy.policy is not CacheAgnosticPolicy.FCFS or policy.enable_priority_scheduling
    return gate if gate.turnstile.limit and not ordered else None
