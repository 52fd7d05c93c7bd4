"""What the cache counted, and whether it is sound. Invariant numbers are the README's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from radix.node import Node, nodes_below
from radix.values import Kind, Match

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from radix.cache import PrefixCache

_COUNTED = (
    "states",
    "blocks",
    "protected_states",
    "protected_blocks",
    "surplus_states",
    "ghost_tokens",
)  # sizes that the cache keeps and `violations` counts again


class Loss(Enum):
    """Why a prompt's tokens had to be computed although more of it was known, or could be."""

    NO_CHECKPOINT = "no_checkpoint"  # known, but no state was kept there, or but an unproven one
    EVICTED = "evicted"  # a state there was evicted
    REFUSED = "refused"  # no memory for a state that was wanted there, or to resume from it
    DIVERGED = "diverged"  # what is known of it went on differently from here
    TOO_SHORT = "too_short"  # what must be computed though known, and a partial last block
    NEW = "new"  # nothing known went on from here, or no prompt began like this one


class Cause(Enum):
    """What evicted data had to make room for."""

    STATES = "states"
    KV = "kv"
    BOTH = "both"
    FLUSH = "flush"  # nothing: an operator emptied the cache

    @classmethod
    def of(cls, states: int, blocks: int) -> Cause:
        """By the demand."""
        if states and blocks:
            return cls.BOTH
        return cls.STATES if states else cls.KV


@dataclass(slots=True)
class Counters:
    """Running totals. Tokens unless named otherwise; taken - evicted checkpoints = held ones."""

    requests: int = 0
    input_tokens: int = 0
    matched_tokens: int = 0
    resumed_tokens: int = 0
    lost_tokens: Counter[Loss] = field(default_factory=Counter)
    hit_tokens: Counter[Kind] = field(default_factory=Counter)
    taken: Counter[Kind] = field(default_factory=Counter)  # checkpoints
    evicted: Counter[tuple[Kind, Cause]] = field(default_factory=Counter)  # checkpoints
    evicted_tokens: Counter[Cause] = field(default_factory=Counter)  # of KV
    skipped: Counter[Kind] = field(default_factory=Counter)  # stops without room for a state
    present: Counter[Kind] = field(default_factory=Counter)  # offered where a checkpoint was

    def record(self, match: Match, block_size: int) -> None:
        """Count one request."""
        self.requests += 1
        self.input_tokens += match.prompt_len
        self.matched_tokens += match.matched_len
        self.resumed_tokens += match.resume_len
        if match.kind is not None:
            self.hit_tokens[match.kind] += match.resume_len
        for loss, tokens in losses(match, block_size):
            self.lost_tokens[loss] += tokens


def losses(match: Match, block_size: int) -> Iterator[tuple[Loss, int]]:
    """Split [resume_len, prompt_len) by reason; the parts add up.

    Told before `Held.miss` counts what is missed as used: an unproven opportunistic one that is
    gone tells of no lack of memory, as it was there only as long as nothing else was.

    >>> from radix.values import Match
    >>> cold = Match("", 8, 8, 4, None, None, 11, 10, False, None, None, ())
    >>> [(loss.value, tokens) for loss, tokens in losses(cold, 4)]
    [('evicted', 0), ('refused', 0), ('no_checkpoint', 4), ('too_short', 3), ('new', 0)]
    """
    reach = max(match.resume_len, min(match.matched_len, match.limit))
    evicted = max((c.depth for c in match.missed if not c.unproven), default=match.resume_len)
    refused = max(evicted, match.refused)
    yield Loss.EVICTED, evicted - match.resume_len
    yield Loss.REFUSED, refused - evicted
    yield Loss.NO_CHECKPOINT, reach - refused
    known = max(reach, match.matched_len)
    rest = match.prompt_len - known
    unsaid = rest if rest < max(2, block_size) else 0  # the last token; a block begun
    yield Loss.TOO_SHORT, known - reach + unsaid
    yield (Loss.DIVERGED if match.diverged else Loss.NEW), rest - unsaid


@dataclass(frozen=True, slots=True)
class Report:
    """A frozen copy of the counters, the tree's size, and what the policy says of itself."""

    requests: int
    input_tokens: int
    matched_tokens: int
    resumed_tokens: int
    lost_tokens: Mapping[Loss, int]
    hit_tokens: Mapping[Kind, int]
    taken: Mapping[Kind, int]
    evictions: Mapping[tuple[Kind, Cause], int]
    evicted_tokens_for: Mapping[Cause, int]
    skipped: Mapping[Kind, int]
    present: Mapping[Kind, int]
    states: int
    blocks: int
    protected_states: int
    protected_blocks: int
    ghost_tokens: int
    pins: int
    policy: Mapping[str, float]

    @property
    def evicted(self) -> Mapping[Kind, int]:
        """Checkpoints evicted to make room, by kind."""
        made_room = [cause for cause in Cause if cause is not Cause.FLUSH]
        return {kind: sum(self.evictions[kind, cause] for cause in made_room) for kind in Kind}

    @property
    def evicted_tokens(self) -> int:
        """Tokens of KV evicted to make room."""
        return sum(self.evicted_tokens_for.values()) - self.evicted_tokens_for[Cause.FLUSH]

    @property
    def refused_present(self) -> int:
        """States offered where a checkpoint already was."""
        return sum(self.present.values())

    @property
    def held(self) -> Mapping[Kind, int]:
        """Checkpoints in the tree, by kind."""
        return {
            kind: self.taken[kind] - sum(self.evictions[kind, cause] for cause in Cause)
            for kind in Kind
        }


def report(cache: PrefixCache) -> Report:
    """Copy the cache's counters."""
    counters = cache.counters
    return Report(
        requests=counters.requests,
        input_tokens=counters.input_tokens,
        matched_tokens=counters.matched_tokens,
        resumed_tokens=counters.resumed_tokens,
        lost_tokens={loss: counters.lost_tokens[loss] for loss in Loss},
        hit_tokens={kind: counters.hit_tokens[kind] for kind in Kind},
        taken={kind: counters.taken[kind] for kind in Kind},
        evictions={(k, cause): counters.evicted[k, cause] for k in Kind for cause in Cause},
        evicted_tokens_for={cause: counters.evicted_tokens[cause] for cause in Cause},
        skipped={kind: counters.skipped[kind] for kind in Kind},
        present={kind: counters.present[kind] for kind in Kind},
        states=cache.states,
        blocks=cache.blocks,
        protected_states=cache.protected_states,
        protected_blocks=cache.protected_blocks,
        ghost_tokens=cache.ghost_tokens,
        pins=len(cache.pins),
        policy=cache.policy_numbers(),
    )


def violations(cache: PrefixCache) -> list[str]:
    """Recompute every invariant of radix/README.md."""
    found: list[str] = []
    slots: Counter[int] = Counter()
    blocks: Counter[int] = Counter()
    totals: Counter[str] = Counter()
    for namespace, root in cache.roots.items():
        if not root.children and not root.refs:
            found.append(f"R9 namespace {namespace!r} is empty")
        for node in nodes_below(root):
            found += [f"{text} (node at {node.end})" for text in _node(node, cache)]
            if node.checkpoint is not None:
                slots[node.checkpoint.slot] += 1
                totals["protected_states"] += bool(node.holds)
                totals["surplus_states"] += node.checkpoint.surplus and not node.holds
            if node.blocks is None:
                totals["ghost_tokens"] += len(node.tokens)
            else:
                blocks.update(node.blocks.tolist())
                totals["protected_blocks"] += len(node.blocks) if node.guards else 0
    found += [f"R5 slot {slot} held {n} times" for slot, n in slots.items() if n > 1]
    found += [f"R5 block {block} held {n} times" for block, n in blocks.items() if n > 1]
    totals["states"], totals["blocks"] = slots.total(), blocks.total()
    for name in _COUNTED:
        if getattr(cache, name) != totals[name]:
            found.append(f"R6 {name} says {getattr(cache, name)}, recount {totals[name]}")
    if cache.ghost_tokens > cache.config.ghost_tokens:
        found.append(f"R8 {cache.ghost_tokens} ghost tokens, bound {cache.config.ghost_tokens}")
    found += _pins(cache)
    found += _expected(cache)
    found += _probation(cache)
    return found


def _node(node: Node, cache: PrefixCache) -> Iterator[str]:
    size = cache.config.block_size
    parent = node.parent
    assert parent is not None
    resident = sum(child.resident for child in node.children.values())
    held = len(node.blocks) if node.blocks is not None else None
    covered = -(-node.end // size) - node.start // size
    ragged = node.end % size > 0
    merges = len(node.children) == 1 and resident == int(node.resident)
    merges = merges and not any(child.ragged for child in node.children.values())
    key = node.tokens[: size - node.start % size].tobytes()
    lengths = Counter(len(child.tokens) for child in node.children.values() if child.ragged)
    claims = (
        (len(node.tokens) > 0 and node.ragged == ragged, "R1 an edge without an end"),
        (not ragged or covered == 1, "R1 a ragged edge in more than one block"),
        (parent.children.get(key) is node, "R1 not its parent's child"),
        (_alone(parent, key), "R1 a sibling goes through it"),
        (node.ragged_lens == lengths, "R1 ragged children miscounted"),
        (node.end == parent.end + len(node.tokens), "R1 depth is not the sum of the edges"),
        (held in (None, covered), "R1 blocks and tokens disagree"),
        (parent.resident or not node.resident, "R2 resident below a ghost"),
        (node.resident or node.checkpoint is None, "R2 a ghost holds a checkpoint"),
        (node.resident or not node.refs, "R2 a ghost is pinned"),
        (
            not node.resident or node.checkpoint is not None or resident or node.pins,
            "R3 dead KV",
        ),
        (
            node.checkpoint is not None or not (merges or (ragged and node.children)) or node.pins,
            "R4 a point that nothing needs",
        ),
        (node.checkpoint is None or node.checkpoint.node is node, "R5 someone else's checkpoint"),
        (node.resident_children == resident, "R6 resident children miscounted"),
        (node.checkpoint is not None or not node.holds, "R7 a pin protects no checkpoint"),
    )
    return (text for holds, text in claims if not holds)


def _alone(parent: Node, key: bytes) -> bool:
    """Whether no other child's key begins with this one."""
    return sum(other.startswith(key) for other in parent.children) == 1


def _pins(cache: PrefixCache) -> Iterator[str]:
    pins: Counter[int] = Counter()
    holds: Counter[int] = Counter()
    refs: Counter[int] = Counter()
    way: dict[int, Node] = {}  # to any pin
    for pin in cache.pins:
        pins[id(pin.node)] += 1
        holds[id(pin.node)] += not cache.pins.is_relaxed(pin)
        refs[id(pin.node)] += 1
        way.update({id(node): node for node in pin.node.lineage()})
        checkpoint = pin.node.checkpoint
        if pin.depth != pin.node.end:
            yield f"R7 pin {pin.serial} at {pin.depth} is at {pin.node.end}"
        lost = pin.slot != (checkpoint.slot if checkpoint else None)
        if lost and not cache.pins.is_relaxed(pin):
            yield f"R7 pin {pin.serial} at {pin.depth} lost its state"
    refs.update(id(node.parent) for node in way.values() if node.parent is not None)
    for root in cache.roots.values():
        for node in (root, *nodes_below(root)):
            counted = (node.pins, node.holds, node.refs)
            recount = (pins[id(node)], holds[id(node)], refs[id(node)])
            if counted != recount:
                yield f"R7 node at {node.end}: pins, holds, refs {counted}, recount {recount}"


def _probation(cache: PrefixCache) -> Iterator[str]:
    probation = cache.held.probation
    held = [node.checkpoint for root in cache.roots.values() for node in nodes_below(root)]
    members = [one for one in held if one is not None and one.on_probation]
    if len(members) != len(probation):
        yield f"R11 {len(probation)} on probation, {len(members)} of them held"
    if len(probation) > probation.most(cache.states):
        yield f"R11 {len(probation)} on probation of {cache.states}"
    for checkpoint in members:
        if checkpoint.hits or checkpoint.kind is not Kind.OPPORTUNISTIC or checkpoint.in_answer:
            yield f"R11 the checkpoint at {checkpoint.depth} should not be on probation"


def _expected(cache: PrefixCache) -> Iterator[str]:
    told = [id(checkpoint) for checkpoint in cache.held.expected]
    for root in cache.roots.values():
        for node in nodes_below(root):
            for checkpoint in (node.checkpoint, *node.lost):
                if checkpoint is None or checkpoint.expected == (id(checkpoint) in told):
                    continue
                yield f"R10 checkpoint at {checkpoint.depth}: expected is {checkpoint.expected}"
    if any(checkpoint.lost for checkpoint in cache.held.expected):
        yield "R10 an evicted checkpoint is expected"
