"""vLLM's V1 manager of hybrid models, as it serves Kimi K3: states on the block grid, second sight.

Modelled from the pull requests that made it (37898, 45845, 47782, 52216) and its documentation:
mode `align`, `--prefix-match-unit 128`, retention interval 0,
`--enable-mamba-shared-prefix-checkpoint`.

- KV is cached in blocks of 128 tokens under the hash of everything up to their end, answers
  included.
- A prefill leaves a state at its replay boundary, the last block end before the prompt's last
  token, and at the shared-prefix boundary: if the cached KV reaches further than any cached state,
  the block end where it stops. So a prefix that prompts share is resumed by the third. Decoding
  leaves no state (pull request 50551, which would, is open).
- A hit needs the state and all KV before it. It protects just that while the request runs.
- What nobody uses waits in one queue, states and blocks alike, and goes in the order in which it
  was let go; a request lets go of its deepest blocks first, of its states last.

In vLLM's favour: no padding (its pages hold one group of layers, of one size, so that a state
takes up to a seventh more), room for prompt, answer and states is taken at admission, so nothing
is preempted, and a block that is computed again goes back at once instead of staying as a copy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool import Pool
from radix.tokens import NO_IDS

if TYPE_CHECKING:
    import numpy.typing as npt

    from radix import IdArray
    from radix.sim.server import Setup
    from radix.sim.trace import Request

UNIT = 128  # tokens of a block, and of a match


class Units:
    """Cached units of one kind. A key names a prefix; id 0 is nothing."""

    def __init__(self, keys: int, ids: int) -> None:
        self.by_key: IdArray = np.zeros(keys, dtype=np.int64)
        self.key_of: IdArray = np.full(ids + 1, -1, dtype=np.int64)
        self.users: IdArray = np.zeros(ids + 1, dtype=np.int64)
        self.stamp: IdArray = np.zeros(ids + 1, dtype=np.int64)
        self.idle = 0  # cached and without a user
        self.evicted = 0

    def use(self, ids: IdArray) -> None:
        """One more user for each."""
        self.idle -= int(np.count_nonzero(self.users[ids] == 0))
        self.users[ids] += 1

    def let_go(self, ids: IdArray) -> IdArray:
        """One user less for each; those that have none left, in the same order."""
        self.users[ids] -= 1
        free: IdArray = ids[self.users[ids] == 0]
        self.idle += len(free)
        return free

    def publish(self, keys: IdArray, ids: IdArray) -> IdArray:
        """Name units that one request uses; returns those whose prefix had one, nameless now."""
        fresh = self.by_key[keys] == 0
        self.by_key[keys[fresh]] = ids[fresh]
        self.key_of[ids[fresh]] = keys[fresh]
        self.users[ids[fresh]] = 1
        again: IdArray = ids[~fresh]
        return again

    def forget(self, one: int) -> None:
        """Evict an idle one."""
        self.by_key[self.key_of[one]] = 0
        self.key_of[one] = -1
        self.idle -= 1
        self.evicted += 1


@dataclass(slots=True)
class _Running:
    keys: IdArray  # of the ends of all whole blocks
    hit: int  # blocks
    stops: list[int]  # blocks at whose end a state is still to be left, ascending
    live: IdArray  # its working state
    slots: IdArray  # one a stop
    blocks: IdArray  # not yet published, from `done` on
    done: int
    used_blocks: list[IdArray]
    used_states: list[IdArray]


class Vllm:
    """One scheduler's memory; ids from one `Pool`, which fits what one block pool would."""

    name = "vllm"

    def __init__(self, setup: Setup) -> None:
        first = setup.trace.requests[0]
        self._trace_block = first.block_size
        self._parts = max(1, self._trace_block // UNIT)
        if self._trace_block % UNIT and UNIT % self._trace_block:
            raise ValueError(
                f"--policy vllm needs trace blocks that divide or are divided by {UNIT} tokens, "
                f"{setup.trace.name} has {self._trace_block}"
            )
        self.pool = Pool(setup.model.geometry(setup.capacity_bytes, UNIT))
        keys = setup.trace.id_limit * self._parts
        self.blocks = Units(keys, self.pool.geometry.max_blocks)
        self.states = Units(keys, self.pool.geometry.max_states)
        self._queue: deque[tuple[Units, int, int]] = deque()
        self._stamps = 0
        self._running: dict[Request, _Running] = {}
        self._taken = {"taken_replay": 0, "taken_shared": 0}

    # -- the server -------------------------------------------------------------------------

    def begin(self, request: Request) -> int | None:
        """Find the deepest state with all its KV, protect them, take everything else at once."""
        keys = self._keys(request)
        replay = (request.prompt_len - 1) // UNIT
        reach = _leading(self.blocks.by_key[keys[:replay]])
        standing = np.flatnonzero(self.states.by_key[keys[:reach]])
        hit = int(standing[-1]) + 1 if len(standing) else 0
        stops = sorted({depth for depth in (reach, replay) if depth > hit})
        used_blocks = self.blocks.by_key[keys[:hit]]
        used_states = self.states.by_key[keys[hit - 1 : hit]] if hit else NO_IDS
        self.blocks.use(used_blocks)
        self.states.use(used_states)
        blocks = -(-request.computed_len // UNIT) - hit
        if not self._make_room(1 + len(stops), blocks):
            self._idle(self.states, used_states)
            self._idle(self.blocks, used_blocks[::-1])
            return None
        grant = self.pool.alloc(1 + len(stops), blocks)
        assert grant is not None
        self._running[request] = _Running(
            keys=keys,
            hit=hit,
            stops=stops,
            live=grant.states[:1],
            slots=grant.states[1:],
            blocks=grant.blocks,
            done=hit,
            used_blocks=[used_blocks],
            used_states=[used_states],
        )
        return hit * UNIT

    def extend(self, request: Request, up_to: int) -> bool:
        """Publish whole blocks, and the states of the stops that were passed."""
        running = self._running[request]
        whole = up_to // UNIT
        count = whole - running.done
        if count > 0:
            keys, ids = running.keys[running.done : whole], running.blocks[:count]
            self._publish(self.blocks, keys, ids, running.used_blocks)
            running.blocks, running.done = running.blocks[count:], whole
        while running.stops and running.stops[0] <= whole:
            depth = running.stops.pop(0)
            replay = depth == (request.prompt_len - 1) // UNIT
            self._taken["taken_replay" if replay else "taken_shared"] += 1
            keys, ids = running.keys[depth - 1 : depth], running.slots[:1]
            self._publish(self.states, keys, ids, running.used_states)
            running.slots = running.slots[1:]
        return True

    def finish(self, request: Request) -> None:
        """Let go: deepest blocks first, states last."""
        running = self._running.pop(request)
        self.pool.free(np.concatenate((running.live, running.slots)), running.blocks)
        self._idle(self.blocks, np.concatenate(running.used_blocks)[::-1])
        self._idle(self.states, np.concatenate(running.used_states)[::-1])

    def counters(self) -> dict[str, int]:
        """What is held, was left and was evicted."""
        return self._taken | {
            "states": self.pool.live_states,
            "blocks": self.pool.live_blocks,
            "evicted_states": self.states.evicted,
            "evicted_blocks": self.blocks.evicted,
        }

    # -- inside -----------------------------------------------------------------------------

    def _keys(self, request: Request) -> IdArray:
        """What names the prefixes that end at multiples of a block: equal only if they are."""
        ends = np.arange(UNIT, request.computed_len + 1, UNIT, dtype=np.int64) - 1
        ids = request.ids[ends // self._trace_block]
        return ids * self._parts + ends % self._trace_block // UNIT

    def _publish(self, units: Units, keys: IdArray, ids: IdArray, used: list[IdArray]) -> None:
        again = units.publish(keys, ids)
        present = units.by_key[keys]
        others = present[~np.isin(present, ids)] if len(again) else NO_IDS
        units.use(others)
        used.append(present)
        if len(again):
            self.pool.free(*((NO_IDS, again) if units is self.blocks else (again, NO_IDS)))

    def _idle(self, units: Units, ids: IdArray) -> None:
        for one in units.let_go(ids).tolist():
            self._stamps += 1
            units.stamp[one] = self._stamps
            self._queue.append((units, one, self._stamps))

    def _make_room(self, states: int, blocks: int) -> bool:
        """Evict from the head of the queue until so much fits; False, nothing done, if never."""
        pool = self.pool
        if not pool.fits_after(
            states, blocks, freed_states=self.states.idle, freed_blocks=self.blocks.idle
        ):
            return False
        gone: dict[Units, list[int]] = {self.states: [], self.blocks: []}
        slots, ids = gone[self.states], gone[self.blocks]
        while not pool.fits_after(states, blocks, freed_states=len(slots), freed_blocks=len(ids)):
            units, one, stamp = self._queue.popleft()
            if units.stamp[one] == stamp and not units.users[one]:
                units.forget(one)
                gone[units].append(one)
        pool.free(np.array(slots, dtype=np.int64), np.array(ids, dtype=np.int64))
        return True


def _leading(ids: npt.NDArray[np.int64]) -> int:
    """How many stand before the first 0."""
    gaps = np.flatnonzero(ids == 0)
    return int(gaps[0]) if len(gaps) else len(ids)


def make(setup: Setup) -> Vllm:
    """Build it."""
    return Vllm(setup)
