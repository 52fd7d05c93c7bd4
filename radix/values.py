"""The frozen values that `PrefixCache` takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from radix.checkpoint import Checkpoint
    from radix.node import Node
    from radix.tokens import IdArray, TokenArray

SlotId = NewType("SlotId", int)


class Kind(Enum):
    """Why a checkpoint was taken."""

    PROMPT_END = "prompt_end"
    TURN_END = "turn_end"
    INTERVAL = "interval"
    JUNCTION = "junction"
    BOUNDARY = "boundary"
    OPPORTUNISTIC = "opportunistic"
    RETRACT = "retract"


ENDS = (Kind.PROMPT_END, Kind.TURN_END, Kind.RETRACT)
"""Kinds that mark how far a request came, as opposed to a place on its way."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What memory and recompute cost, in the units of the policy's arithmetic.

    The defaults are Kimi K3 at TP8 (fp32 state, bf16 KV); a server passes its own geometry.
    `pair_flops` is the quadratic MLA part per (query, key) pair in units of one token's linear
    part: recomputing [a, b) costs `(b - a) + pair_flops * (b^2 - a^2) / 2`.
    """

    state_bytes: int = 56_171_520
    token_bytes: int = 27_648
    pair_flops: float = 0.0

    def __post_init__(self) -> None:
        if self.state_bytes < 1 or self.token_bytes < 1 or self.pair_flops < 0:
            raise ValueError(f"costs must be positive (pair_flops may be 0): {self}")

    def recompute(self, start: int, end: int) -> float:
        """Cost of prefilling [start, end) after the KV of [0, start), in linear tokens."""
        return (end - start) + self.pair_flops * (end - start) * (end + start) / 2


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What the tree is built for. Lengths are in tokens.

    `grid` is the unit of INTERVAL, JUNCTION and OPPORTUNISTIC depths (the state kernel's chunk).
    `interval` and `opportunistic` of 0 switch those checkpoints off. `ghost_tokens` bounds the
    tokens remembered without bytes. Opportunistic checkpoints are planned only while the pool
    could still serve `reserve_states` and `reserve_blocks` more and evict none but surplus ones.
    `dense` is for kernels that write states inside a pass: extra ones cost memory but no cut, so
    they stand every `dense` tokens where that is little beside what is free; 0: each costs a cut.
    With it a few are taken at the cost of others, and one in `probation` of all states is kept for
    the youngest of them (`radix.probation`); 0: none.
    """

    block_size: int
    grid: int
    interval: int = 32_768
    opportunistic: int = 0
    dense: int = 0
    probation: int = 16
    ghost_tokens: int = 16_777_216
    reserve_states: int = 1
    reserve_blocks: int = 0
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.grid < 1 or self.grid % self.block_size:
            near = max(1, round(self.grid / self.block_size)) * self.block_size
            raise ValueError(
                f"grid {self.grid} must be a multiple of block_size {self.block_size}, try {near}"
            )
        for name in ("interval", "opportunistic", "dense"):
            value = getattr(self, name)
            if value < 0 or value % self.grid:
                near = max(1, round(value / self.grid)) * self.grid
                raise ValueError(
                    f"{name} {value} must be 0 (off) or a multiple of grid {self.grid}, try {near}"
                )
        counts = self.ghost_tokens, self.reserve_states, self.reserve_blocks, self.probation
        if min(counts) < 0:
            raise ValueError(f"ghost_tokens, probation and reserves cannot be negative: {self}")


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows about a prompt. Nothing is held; `pin` it before evicting anything.

    `matched_len` is the longest known prefix, ghosts included; `resident_len` the part of it whose
    KV is resident; `resume_len` the deepest checkpoint that may be restored (0: none), with its
    state in `slot`; `junction` the grid depth up to which the prompt is known although no
    checkpoint covers it. What is known ends at a block boundary or at a checkpoint. `diverged` says
    that some of it is known, and that this went on differently.
    """

    namespace: Hashable
    matched_len: int
    resident_len: int
    resume_len: int
    junction: int | None
    slot: SlotId | None
    prompt_len: int
    limit: int
    diverged: bool
    kind: Kind | None
    node: Node | None = field(repr=False, compare=False)
    missed: tuple[Checkpoint, ...] = field(repr=False, compare=False)  # lost, past resume_len
    refused: int = 0  # deepest depth past resume_len where no memory could be had for a state

    def unresumed(self) -> Match:
        """The same for a request that has no memory to resume beside its own: from the start."""
        refused = max(self.refused, self.resume_len)
        return replace(self, resume_len=0, slot=None, kind=None, node=None, refused=refused)


@dataclass(frozen=True, slots=True)
class Stop:
    """A depth at which the prefill should leave a state, and why."""

    depth: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Pin:
    """The receipt that protects KV [0, depth) and the state at `depth`; unpin it exactly once."""

    serial: int
    namespace: Hashable
    depth: int
    slot: SlotId | None
    node: Node = field(repr=False, compare=False)
    turn: int  # which request: the serial of its first pin


class Offer(NamedTuple):
    """A state for the tree.

    At a depth inside a block it brings a block of its own, `tail`, with the KV rows up to there:
    the request's own last block goes on being written.
    """

    depth: int
    slot: SlotId
    kind: Kind
    tail: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit did.

    `pin` moved to `kept_len` (None after a finished commit). `blocks` are the canonical block ids
    of the whole blocks of [old depth, kept_len), from the one in which the old depth lies; within
    `duplicates` (token ranges of whole blocks) they differ from the caller's, who frees its copies
    there. `refused` slots and `spare` tails stay the caller's.
    """

    pin: Pin | None
    kept_len: int
    duplicates: tuple[tuple[int, int], ...]
    blocks: IdArray
    refused: tuple[SlotId, ...]
    spare: tuple[int, ...] = ()


def check_commit(
    pin: Pin,
    tokens: TokenArray,
    namespace: Hashable,
    block_ids: IdArray,
    offers: Sequence[Offer],
    block_size: int,
) -> None:
    """Raise ValueError unless pin, key, blocks and offered states of a commit fit together."""
    if namespace != pin.namespace:
        raise ValueError(f"commit to {namespace!r} under a pin of {pin.namespace!r}")
    if len(tokens) < pin.depth:
        raise ValueError(f"{len(tokens)} tokens do not reach the pin at {pin.depth}")
    expected = len(tokens) // block_size - pin.depth // block_size
    if len(block_ids) != expected:
        raise ValueError(
            f"[{pin.depth}, {len(tokens)}) has {expected} whole blocks of {block_size}, "
            f"got {len(block_ids)} ids"
        )
    for offer in offers:
        if not 0 < offer.depth <= len(tokens):
            raise ValueError(f"a state at {offer.depth} does not fit {len(tokens)} tokens")
        if (offer.depth % block_size == 0) != (offer.tail is None):
            raise ValueError(
                f"a state at {offer.depth} with tail {offer.tail}: in blocks of {block_size} it "
                "needs one exactly if it lies inside a block"
            )
    depths = [offer.depth for offer in offers]
    slots = [offer.slot for offer in offers]
    if len(set(depths)) != len(depths) or len(set(slots)) != len(slots):
        raise ValueError(f"the same depth or slot twice in one commit: {offers}")
