"""What a request takes to go on from a state: copies of the state and of its last block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kimi_k3.budget import answer_tokens
from sgl_kimi_k3.keys import known_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.managers.schedule_batch import Req

    from radix import IdArray, Match, PrefixCache
    from radix.checkpoint import Checkpoint
    from sgl_kimi_k3.arena import Arena
    from sgl_kimi_k3.room import Room

# Waiting requests that are looked up: what is behind these is far from being admitted.
EXPECTED_REQUESTS = 64


class Resumes:
    """Takes what resuming needs, and tells the tree which states are about to be resumed.

    Args:
        cache: the tree.
        arena: the memory.
        room: where slots and blocks are taken.
        step_tokens: tokens that a decode step takes memory for.
    """

    def __init__(
        self, cache: PrefixCache, arena: Arena, room: Room, *, step_tokens: int = 1
    ) -> None:
        self._cache = cache
        self._arena = arena
        self._room = room
        self._step_tokens = step_tokens
        self._size = arena.geometry.block_size

    def fits(self, req: Req) -> bool:
        """Whether an arena with nothing else in it admits the request beside what it copies from.

        As `PrefillAdder.add_one_req` counts, with a block for each of the three places it rounds.
        """
        tokens = len(req.full_untruncated_fill_ids) + answer_tokens(req) + self._step_tokens - 1
        geometry = self._arena.geometry
        room = geometry.blocks_above(geometry.state_end(2)) * self._size
        return tokens + 3 * self._size <= room

    def take_live_slot(self, req: Req, match: Match) -> bool:
        """A slot for the request's own state, to be copied from the match's; False: no room."""
        if not req.kv.holds_mamba:
            pin = self._cache.pin(match)
            grant = self._room.take(states=1, blocks=0)
            self._cache.unpin(pin)
            if grant is None:
                return False
            req.kv.mamba_pool_idx = self._arena.slots.of(int(grant.states[0]))[0]
        req.kv.mamba_cow_src_index = self._arena.slots.of(match.slot)
        req.kv.mamba_needs_clear = False
        return True

    def take_blocks(self, req: Req) -> IdArray | None:
        """Blocks of the prefix that the request matched; None: no room.

        If the prefix ends inside a block, the last is the request's own with the same rows, and it
        goes on in it: the tree's is never written, and two requests never share one they write.
        The copy runs on the forward's stream, behind the forward that filled the tree's block.
        """
        blocks = self._cache.path_blocks(req.last_node)
        if req.prefix_len % self._size:
            grant = self._room.take(states=0, blocks=1)
            if grant is None:
                return None
            self._arena.copy_blocks([(int(blocks[-1]), int(grant.blocks[0]))])
            blocks[-1] = grant.blocks[0]
        return blocks

    def expect(self, waiting: list[Req], due: Sequence[Checkpoint]) -> None:
        """Have the states that waiting requests will resume from evicted last, and those `due`.

        A request is looked up once, and not before it has waited for a whole pass: most never do.
        """
        matches = []
        for req in waiting[:EXPECTED_REQUESTS]:
            known = req.__dict__
            if "kimi_k3_expected" not in known:
                known["kimi_k3_expected"] = None  # seen
                continue
            if known["kimi_k3_expected"] is None:
                known["kimi_k3_expected"] = known_of(req, self._cache)
            matches.append(known["kimi_k3_expected"])
        self._cache.expect(matches, due)
