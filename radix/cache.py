"""PrefixCache: which prefixes and states are kept, over a pool that only counts.

Every call is deterministic: no clock, no randomness, no iteration over sets. One call is one
atomic change; a call that raises ValueError has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from radix import report as reporting
from radix.expected_loss import ExpectedLoss
from radix.ghosts import Ghosts
from radix.growth import Growth
from radix.held import Held
from radix.matching import find, resumed
from radix.node import Node, nodes_below
from radix.pins import Pins
from radix.retention import plan_stops
from radix.returns import Returns
from radix.tokens import NO_IDS, IdArray, Key, TokenArray, check_tokens
from radix.tree import Tree, new_root, remember_refused
from radix.values import (
    ENDS,
    CacheConfig,
    Commit,
    Kind,
    Match,
    Offer,
    Pin,
    SlotId,
    Stop,
    check_commit,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from radix.checkpoint import Checkpoint
    from radix.eviction import EvictionPolicy
    from radix.ports import GrantLike, PoolPort


class PrefixCache:
    """A sparse radix tree of KV blocks with state checkpoints at chosen depths.

    `pool` is asked for room and given back what is evicted; `policy` orders the victims. Depths
    are token counts from 0. Ids are the pool's.
    """

    def __init__(
        self, pool: PoolPort, config: CacheConfig, policy: EvictionPolicy | None = None
    ) -> None:
        self.config = config
        self.counters = reporting.Counters()
        self.roots: dict[Hashable, Node] = {}
        self.pins = Pins()
        self.held = Held(
            ExpectedLoss(config.costs) if policy is None else policy,
            probation=config.probation if config.dense else 0,
        )
        self.returns = Returns()
        self._pool = pool
        self._tree = Tree(config.block_size)
        self._ghosts = Ghosts(self._tree, config.ghost_tokens, self.held.policy.forget)
        self._growth = Growth(self._tree, self.held, self.counters)

    # -- looking up -------------------------------------------------------------------------

    def match(self, tokens: TokenArray, namespace: Hashable, *, limit: int | None = None) -> Match:
        """What is known of `tokens` (int64, 1-D). Pure.

        `resume_len` is at most `limit` and at most len(tokens) - 1: the last token is always
        computed, and a state that contains it must not be restored. Costs per edge and per
        32,768 compared tokens. Raises ValueError for another dtype or shape.
        """
        check_tokens(tokens)
        cap = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        root = self.roots.get(namespace)
        return find(self._tree, root, Key.of(tokens), namespace, cap=cap, grid=self.config.grid)

    def stops(
        self, match: Match, *, start: int, prompt_len: int, boundaries: Sequence[int] = ()
    ) -> tuple[Stop, ...]:
        """Sorted depths in (start, prompt_len] at which the prefill should leave a state. Pure.

        Opportunistic depths are planned only if the pool, evicting nothing but surplus ones, has
        room for all the planned states, the blocks of [start, prompt_len) and the configured
        reserve; or a few of them, which will be on probation.
        """
        blocks = -(-(prompt_len - start) // self.config.block_size)
        return plan_stops(
            self.config,
            match,
            start=start,
            prompt_len=prompt_len,
            boundaries=boundaries,
            spare=lambda states: self.spare(states, blocks),
            few=self.few,
        )

    def spare(self, states: int, blocks: int, *, surplus: bool = True) -> bool:
        """Whether the pool has room for these and the configured reserve. O(1).

        Surplus opportunistic states that no pin protects count as free, unless told otherwise:
        whoever comes next takes their memory before any other.
        """
        states += self.config.reserve_states
        blocks += self.config.reserve_blocks
        return self._spares(states, blocks) if surplus else self._pool.fits(states, blocks)

    def _spares(self, states: int, blocks: int) -> bool:
        return self._pool.fits_after(states, blocks, freed_states=self.held.surplus, freed_blocks=0)

    def record(self, match: Match) -> None:
        """Count a request once, when it is first scheduled, and what it missed."""
        self.counters.record(match, self.config.block_size)
        self.held.miss(match)

    # -- holding ----------------------------------------------------------------------------

    def pin(self, match: Match) -> Pin:
        """Protect KV [0, resume_len) and the state there. O(edges of the path).

        Raises ValueError if the checkpoint was evicted since the match: match again.
        """
        node = self._current(match)
        if node is None:
            node = self.roots.setdefault(match.namespace, new_root())
        return self._hold(node, match.namespace)

    def _current(self, match: Match) -> Node | None:
        node = match.node
        if node is not None and resumed(match) is None:
            raise ValueError(f"stale match: the state at {match.resume_len} is gone, match again")
        return node

    def _hold(self, node: Node, namespace: Hashable, turn: int | None = None) -> Pin:
        pin = self.pins.open(node, namespace, turn)
        self.held.reconsider(node.checkpoint)
        return pin

    def relax(self, pin: Pin) -> None:
        """Stop protecting the state, once it has been copied; the KV stays protected. Idempotent.

        Raises ValueError for a pin that is not open here.
        """
        self.pins.check(pin)
        self.pins.relax(pin)
        self.held.reconsider(pin.node.checkpoint)

    def unpin(self, pin: Pin) -> None:
        """Let go. Raises ValueError for a pin that is not open here."""
        self.relax(pin)
        self.pins.close(pin)
        dead = self._bury(pin.node)
        if dead:
            self._pool.free(NO_IDS, np.concatenate(dead))
            self._trim_ghosts()
        self._forget_empty(pin.namespace)

    def _forget_empty(self, namespace: Hashable) -> None:
        root = self.roots.get(namespace)
        if root is not None and not root.refs and not root.children:
            del self.roots[namespace]

    def touch(self, pin: Pin) -> None:
        """Mark the pinned checkpoint, and no other, as consumed by a request."""
        self.pins.check(pin)
        self.held.consume(pin.node.checkpoint)

    def expect(self, matches: Sequence[Match], ends: Sequence[Checkpoint] = ()) -> None:
        """Tell that requests wait which will resume from these; replaces what was told before.

        So will those that continue `ends`, which are as good as here.  Not a pin: their checkpoints
        may be evicted, but what a queue is about to use is worth more than anything learned
        promises.  What is gone is passed over.  O(matches + ends).
        """
        self.held.expect(matches, ends)

    def path_blocks(self, held: Pin | Match) -> IdArray:
        """Block ids of [0, depth) of a pin, or of [0, resume_len) of a current match.

        If that ends inside a block, the last one is filled up to there and must not be written:
        who goes on from there copies its rows into a block of its own.
        """
        node = held.node if isinstance(held, Pin) else self._current(held)
        if node is None:
            return NO_IDS
        return self._tree.blocks_between(node, 0, node.end)

    # -- making room ------------------------------------------------------------------------

    @property
    def states(self) -> int:
        """Checkpoints in the tree."""
        return self.held.count

    @property
    def protected_states(self) -> int:
        """Checkpoints that a pin protects."""
        return self.pins.protected_states

    @property
    def protected_blocks(self) -> int:
        """Blocks on the way to a pin."""
        return self.pins.protected_blocks

    @property
    def evictable_states(self) -> int:
        """Checkpoints that no pin protects."""
        return self.states - self.protected_states

    @property
    def surplus_states(self) -> int:
        """Opportunistic checkpoints that are as good as free: unused, no longer on probation."""
        return self.held.surplus

    @property
    def evictable_blocks(self) -> int:
        """Blocks that no pin needs."""
        return self.blocks - self.protected_blocks

    @property
    def blocks(self) -> int:
        """KV blocks in the tree."""
        return self._tree.blocks

    @property
    def ghost_tokens(self) -> int:
        """Tokens remembered without bytes."""
        return self._tree.ghost_tokens

    def fits(self, states: int, blocks: int) -> bool:
        """Whether `acquire` would succeed. O(1), joint over both kinds."""
        return self._pool.fits_after(
            states, blocks, freed_states=self.evictable_states, freed_blocks=self.evictable_blocks
        )

    def evict(self, states: int, blocks: int) -> bool:
        """Evict, victim by victim, until the pool fits the demand; False: impossible, untouched."""
        if not self.fits(states, blocks):
            return False
        cause = reporting.Cause.of(states, blocks)
        slots: list[int] = []
        pieces: list[IdArray] = [NO_IDS]
        freed = 0
        while not self._pool.fits_after(
            states, blocks, freed_states=len(slots), freed_blocks=freed
        ):
            victim = self.held.policy.victim(self.held.tick)
            assert victim is not None, (states, blocks, len(slots), freed)
            slots.append(victim.slot)
            self.counters.evicted[victim.kind, cause] += 1
            self.held.lose(victim)
            for piece in self._bury(victim.node):
                pieces.append(piece)
                freed += len(piece)
        if slots:
            self.counters.evicted_tokens[cause] += freed * self.config.block_size
            self._pool.free(np.array(slots, dtype=np.int64), np.concatenate(pieces))
            self._trim_ghosts()
        return True

    def acquire(self, states: int, blocks: int) -> GrantLike | None:
        """Evict until the demand fits, then take it; None: impossible, nothing evicted."""
        if not self.evict(states, blocks):
            return None
        grant = self._pool.alloc(states, blocks)
        assert grant is not None, ("the pool refused what it said would fit", states, blocks)
        return grant

    def evict_surplus(self, states: int, blocks: int, *, reserve_states: int = 0) -> bool:
        """Make room for opportunistic states: of others, none but surplus ones are evicted.

        False, with nothing evicted, unless so many states more would fit in the same way.
        """
        # All surplus ones would do, and they are the first victims: it ends before any other.
        return self._spares(states + reserve_states, blocks) and self.evict(states, blocks)

    def evict_for_few(
        self, states: int, blocks: int, *, reserve_states: int = 0, reserve_blocks: int = 0
    ) -> bool:
        """Make room for the few opportunistic states that a prompt may leave at others' cost.

        Not at the cost of what waiting requests will resume from. False, with nothing evicted,
        unless the reserves would fit as well.
        """
        needed = states + reserve_states
        free = self.evictable_states - len(self.held.expected) >= needed
        return free and self.fits(needed, blocks + reserve_blocks) and self.evict(states, blocks)

    @property
    def few(self) -> int:
        """How many opportunistic states a prompt may leave at the cost of others."""
        return self.held.probation.few(self.states)

    def _bury(self, node: Node) -> list[IdArray]:
        """Take the KV from `node` upwards that serves no checkpoint and no pin; its blocks."""
        pieces: list[IdArray] = []
        while node.parent is not None and not (
            node.checkpoint is not None or node.resident_children or node.refs
        ):
            parent = node.parent
            pieces.append(self._tree.make_ghost(node))
            self._ghosts.queue(self._tree.compress(node), self.held.tick)
            node = parent
        survivor = self._tree.compress(node)
        if node.ragged and survivor is not node and node.blocks is not None:
            pieces.append(node.blocks)
        above = next((n.checkpoint for n in survivor.lineage() if n.checkpoint is not None), None)
        if above is not None and (above.kind in ENDS or survivor.resident_children < 2):
            self.held.reconsider(above)
        return pieces

    def _trim_ghosts(self) -> None:
        bare = self._ghosts.trim()
        if bare:
            self.roots = {n: r for n, r in self.roots.items() if r not in bare or r.refs}

    # -- growing ----------------------------------------------------------------------------

    def commit(
        self,
        pin: Pin,
        tokens: TokenArray,
        namespace: Hashable,
        block_ids: IdArray,
        checkpoints: Sequence[tuple[int, SlotId, Kind] | Offer],
        *,
        finished: bool,
        refused: Sequence[int] = (),
    ) -> Commit:
        """Publish what a request computed: `tokens` so far, and states at some of its depths.

        `block_ids` are those of the whole blocks up to len(tokens), from the one in which pin.depth
        lies. The tree takes KV up to the deepest checkpoint L on the way, offered or already
        there, and the offered slots whose depth has none yet, with their tails. Everything else
        stays the caller's; the tokens past L are remembered as a ghost. The pin moves to L, or is
        released if `finished`. `refused` are depths where a state was wanted and no memory could
        be had: what that costs later is told apart.

        Raises ValueError, with nothing changed, if the pin is not open or not on the way of
        `tokens`, or an offer does not fit the key.
        """
        size = self.config.block_size
        offers = [Offer(*offer) for offer in checkpoints]
        check_tokens(tokens)
        self.pins.check(pin)
        check_commit(pin, tokens, namespace, block_ids, offers, size)
        root, key = self.roots[namespace], Key.of(tokens)
        if not self._tree.is_on_way(pin.node, key):
            raise ValueError(f"the pin at {pin.depth} is not on the way of these tokens")
        walk = self._tree.walk(pin.node, key)
        known = (*pin.node.lineage(), *walk.path)
        held = {node.end for node in known if node.checkpoint is not None}
        taken = sorted((o for o in offers if o.depth not in held), key=lambda offer: offer.depth)
        already = [offer for offer in offers if offer.depth in held]
        for offer in already:
            self.counters.present[offer.kind] += 1
        kept = max([pin.depth, *held, *(offer.depth for offer in taken)])
        first, last = pin.depth // size, kept // size
        spare = [offer.tail for offer in already if offer.tail is not None]
        end, unused = self._growth.grow(root, pin, key, block_ids, taken, kept)
        self._ghosts.remember(end, key, max(walk.matched_len, kept), self.held.tick)
        for depth in (depth - depth % size for depth in refused):
            start = pin.node if pin.depth < depth else root
            remember_refused(self._tree.walk(start, key, depth), depth)

        shared = min(walk.resident_len // size, last)
        blocks = block_ids[: last - first].copy()
        if shared > first:
            blocks[: shared - first] = self._tree.blocks_between(end, first * size, shared * size)
        moved = None if finished else self._hold(end, namespace, pin.turn)
        if moved is None:
            self.returns.left(pin.turn, end.checkpoint, self.held.tick)
        else:
            self.relax(moved)  # the request goes on with its own live state
        self.unpin(pin)
        self._trim_ghosts()
        duplicates = ((first * size, shared * size),) if shared > first else ()
        slots = tuple(offer.slot for offer in already)
        return Commit(moved, kept, duplicates, blocks, slots, (*spare, *unused))

    # -- the whole --------------------------------------------------------------------------

    def flush(self) -> tuple[IdArray, IdArray]:
        """Forget everything, ghosts included; returns the state and block ids that were held.

        The pool is not told. Raises ValueError if pins are open.
        """
        if self.pins:
            raise ValueError(f"{len(self.pins)} pins are open; flush needs an idle cache")
        states: list[int] = []
        pieces: list[IdArray] = [NO_IDS]
        for root in self.roots.values():
            for node in nodes_below(root):
                if node.checkpoint is not None:
                    states.append(node.checkpoint.slot)
                    self.counters.evicted[node.checkpoint.kind, reporting.Cause.FLUSH] += 1
                self.held.forget(node)
                if node.blocks is not None:
                    pieces.append(node.blocks)
        self.counters.evicted_tokens[reporting.Cause.FLUSH] += self.blocks * self.config.block_size
        self.roots.clear()
        self._ghosts.clear()
        self._tree.clear()
        self.returns.forget()
        return np.array(states, dtype=np.int64), np.concatenate(pieces)

    def policy_numbers(self) -> dict[str, float]:
        """What the shipped policy says of itself; another's say nothing."""
        policy = self.held.policy
        return policy.numbers() if isinstance(policy, ExpectedLoss) else {}

    def report(self) -> reporting.Report:
        """Counters and sizes, frozen."""
        return reporting.report(self)

    def violations(self) -> list[str]:
        """Broken invariants, recomputed from scratch; empty when sound. O(tree)."""
        return reporting.violations(self)
