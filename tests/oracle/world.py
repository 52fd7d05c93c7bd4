"""A small world: the real cache and pool over a painted arena, and requests that really run.

The fold oracle: the "state" after d tokens is a non-commutative hash of tokens[0:d], written into
the pool's bytes with namespace and depth; a KV row holds the hash up to its token. Every restore
recomputes them, so a wrong depth, owner or tenant, a stale or an unwritten byte shows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from mempool.geometry import Geometry
from mempool.ids import Side
from mempool.pool import Pool
from radix import CacheConfig, Lease, PrefixCache, SlotId, Stop, admit
from radix.node import nodes_below

STATE_BYTES = 32
BLOCK_BYTES = 16  # at least


def fold(namespace, tokens) -> bytes:
    """What a state that stands after `tokens` must contain."""
    text = repr((namespace, len(tokens), [int(t) for t in tokens])).encode()
    return hashlib.blake2b(text, digest_size=STATE_BYTES).digest()


def rows(namespace, tokens, size) -> np.ndarray:
    """What the KV of each of `tokens` must contain: uint8 [len(tokens), size]."""
    running = hashlib.blake2b(repr(namespace).encode(), digest_size=size)
    out = np.empty((len(tokens), size), dtype=np.uint8)
    for position, token in enumerate(tokens):
        running.update(b"%d," % token)
        out[position] = np.frombuffer(running.copy().digest(), dtype=np.uint8)
    return out


class PaintedPool:
    """A `PoolPort` over a real pool that makes moves, zeroes stale and poisons freed bytes."""

    def __init__(self, geometry: Geometry) -> None:
        self.pool = Pool(geometry)
        self.arena = np.full(geometry.total_bytes, 0xFF, dtype=np.uint8)
        self.fits, self.fits_after = self.pool.fits, self.pool.fits_after

    def _bytes(self, side, index):
        geometry = self.pool.geometry
        size = geometry.state_bytes if side is Side.STATE else geometry.block_bytes
        return self.arena[index * size : (index + 1) * size]

    def alloc(self, states, blocks):
        grant = self.pool.alloc(states, blocks)
        if grant is None:
            return None
        for move in grant.moves:
            for source, target in zip(move.sources, move.targets, strict=True):
                self._bytes(move.side, target)[:] = self._bytes(move.side, source)
                self._bytes(move.side, source)[:] = 0xFF
        for index in grant.stale_states:
            self._bytes(Side.STATE, index)[:] = 0
        for index in grant.stale_blocks:
            self._bytes(Side.BLOCK, index)[:] = 0
        return grant

    def free(self, states, blocks) -> None:
        state_indices = self.pool.states.index_of(states)
        block_indices = self.pool.blocks.index_of(blocks)
        self.pool.free(states, blocks)
        for index in state_indices:
            self._bytes(Side.STATE, index)[:] = 0xFF
        for index in block_indices:
            self._bytes(Side.BLOCK, index)[:] = 0xFF

    def state(self, slot):
        return self._bytes(Side.STATE, int(self.pool.states.index_of(np.array([slot]))[0]))

    def block(self, block_id):
        """Its KV rows, uint8 [block size, row bytes]."""
        index = int(self.pool.blocks.index_of(np.array([block_id]))[0])
        geometry = self.pool.geometry
        row_bytes = geometry.block_bytes // geometry.block_size
        held = self._bytes(Side.BLOCK, index)[: row_bytes * geometry.block_size]
        return held.reshape(geometry.block_size, row_bytes)


@dataclass(eq=False)
class Running:
    """A request in flight: `tokens` are known so far, [0, done) are computed."""

    lease: Lease
    prompt_len: int
    tokens: np.ndarray
    done: int
    resumed: int


@dataclass
class World:
    """Cache, pool and bytes. Sizes are so small that splits and shortages happen all the time."""

    block_size: int = 2
    grid: int = 4
    interval: int = 0
    opportunistic: int = 0
    dense: int = 0
    probation: int = 16
    ghost_tokens: int = 200
    states: int = 100
    blocks: int = 400
    policy: object = None
    cache: PrefixCache = field(init=False)
    port: PaintedPool = field(init=False)

    def __post_init__(self) -> None:
        block_bytes = max(BLOCK_BYTES, self.block_size)
        self.row_bytes = block_bytes // self.block_size
        sink_bytes = max(STATE_BYTES, block_bytes)
        geometry = Geometry(
            total_bytes=sink_bytes + self.states * STATE_BYTES + self.blocks * block_bytes,
            state_bytes=STATE_BYTES,
            block_bytes=block_bytes,
            block_size=self.block_size,
        )
        self.port = PaintedPool(geometry)
        config = CacheConfig(
            block_size=self.block_size,
            grid=self.grid,
            interval=self.interval,
            opportunistic=self.opportunistic,
            dense=self.dense,
            probation=self.probation,
            ghost_tokens=self.ghost_tokens,
        )
        self.cache = PrefixCache(self.port, config, self.policy)

    # -- a request, step by step ------------------------------------------------------------

    def start(self, prompt, namespace=None, boundaries=()) -> Running | None:
        tokens = np.array(prompt, dtype=np.int64)
        lease = admit(self.cache, self.port, tokens, namespace, boundaries=boundaries)
        if lease is None:
            return None
        match = lease.match
        if match.slot is not None:
            self.expect_state(match.slot, namespace, tokens[: match.resume_len])
        path = self.cache.path_blocks(lease.pin)
        self.expect_blocks(path, namespace, tokens[: match.resume_len])
        if match.resume_len % self.block_size:
            self.port.block(lease.blocks[0])[:] = self.port.block(path[-1])
        return Running(lease, len(tokens), tokens, match.resume_len, match.resume_len)

    def advance(self, run: Running, up_to: int) -> None:
        """Prefill up to `up_to`, cutting at every stop on the way and committing there."""
        up_to = min(up_to, len(run.tokens))
        for stop in [s for s in run.lease.stops if run.done < s.depth <= up_to]:
            self._compute(run, stop.depth)
            self._checkpoint(run, stop)
        self._compute(run, up_to)

    def _checkpoint(self, run: Running, stop: Stop) -> None:
        """Copy the live state and, inside a block, the rows so far; then publish."""
        slot = run.lease.take(stop)
        if slot is not None:
            self.write_state(slot, run.lease.namespace, run.tokens[: stop.depth])
            tail = run.lease.offers[-1].tail
            if tail is not None:
                self.port.block(tail)[:] = self.port.block(self._own(run, stop.depth))
        run.lease.commit(run.tokens[: run.done])

    def _own(self, run: Running, position: int) -> int:
        """The request's own block for a position past its pin."""
        size = self.block_size
        return int(run.lease.blocks[position // size - run.lease.pin.depth // size])

    def _compute(self, run: Running, up_to: int) -> None:
        """Write the KV of [done, up_to) into the request's private blocks."""
        size = self.block_size
        text = rows(run.lease.namespace, run.tokens[:up_to], self.row_bytes)
        for position in range(run.done, up_to):
            self.port.block(self._own(run, position))[position % size] = text[position]
        run.done = max(run.done, up_to)

    def decode(self, run: Running, token: int) -> bool:
        """One token more; False if there is no room for it."""
        if not run.lease.extend(len(run.tokens) + 1):
            return False
        run.tokens = np.append(run.tokens, np.int64(token))
        self._compute(run, len(run.tokens))
        return True

    def finish(self, run: Running, *, turn_end: bool = True) -> None:
        tokens = run.tokens[: run.done]
        if turn_end and run.done:
            self.write_state(run.lease.live, run.lease.namespace, tokens)
        run.lease.finish(tokens, run.done if turn_end and run.done else None)

    def serve(self, prompt, namespace=None, output=(), boundaries=(), *, turn_end=False) -> int:
        """A whole request alone; returns what it resumed."""
        run = self.start(prompt, namespace, boundaries)
        assert run is not None, "no room for the prompt"
        self.advance(run, len(run.tokens))
        for token in output:
            assert self.decode(run, token), "no room to decode"
        self.finish(run, turn_end=turn_end)
        self.check()
        return run.resumed

    def match(self, prompt, namespace=None):
        return self.cache.match(np.array(prompt, dtype=np.int64), namespace)

    # -- bytes ------------------------------------------------------------------------------

    def write_state(self, slot: SlotId, namespace, tokens) -> None:
        self.port.state(slot)[:] = np.frombuffer(fold(namespace, tokens), dtype=np.uint8)

    def expect_state(self, slot, namespace, tokens) -> None:
        found = self.port.state(slot).tobytes()
        assert found == fold(namespace, tokens), (slot, namespace, len(tokens))

    def expect_blocks(self, ids, namespace, tokens, start=0) -> None:
        """`ids` cover [start, len(tokens)); all rows of [start, len(tokens)) are right."""
        size = self.block_size
        assert len(ids) == -(-len(tokens) // size) - start // size, (len(ids), start, len(tokens))
        expected = rows(namespace, tokens, self.row_bytes)[start // size * size :]
        for index, block_id in enumerate(ids):
            part = expected[index * size : (index + 1) * size]
            found = self.port.block(block_id)[: len(part)]
            assert np.array_equal(found, part), (block_id, index, namespace)

    # -- soundness --------------------------------------------------------------------------

    def check(self) -> None:
        """Both structures sound, and every cached byte what its key says."""
        assert self.cache.violations() == []
        assert self.port.pool.violations() == []
        for namespace, root in self.cache.roots.items():
            keys = {id(root): root.tokens}
            for node in nodes_below(root):
                keys[id(node)] = key = np.concatenate((keys[id(node.parent)], node.tokens))
                if node.checkpoint is not None:
                    self.expect_state(node.checkpoint.slot, namespace, key)
                if node.blocks is not None:
                    self.expect_blocks(node.blocks, namespace, key, node.start)

    def held_on_path(self, tokens, namespace=None) -> list[int]:
        """Depths of the checkpoints on the way of `tokens`, sorted."""
        root, tokens = self.cache.roots.get(namespace), np.asarray(tokens)
        nodes = () if root is None else nodes_below(root)
        return sorted(
            node.end for node in nodes if node.checkpoint is not None and self._leads(node, tokens)
        )

    @staticmethod
    def _leads(node, tokens) -> bool:
        return all(
            np.array_equal(one.tokens, tokens[one.start : one.end]) for one in node.lineage()
        )

    def held_depths(self, namespace=None) -> list[int]:
        """Depths of all checkpoints, sorted."""
        root = self.cache.roots.get(namespace)
        nodes = () if root is None else nodes_below(root)
        return sorted(node.end for node in nodes if node.checkpoint is not None)
