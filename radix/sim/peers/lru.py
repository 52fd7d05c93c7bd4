"""The plain policy: states at the ends of prompt and turn, least recently consumed goes first.

Tree, pool and leases are the product's own. Nothing is kept on the way through a prompt, nothing
is remembered of evicted prefixes, and only the state that a request resumed from is refreshed, as
SGLang does since pull request 31643. Both kinds of state may stand at any token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from radix import ConsumedLru, EvictionPolicy, Kind
from radix.sim.policies.ours import Ours

if TYPE_CHECKING:
    from radix.sim.server import Setup


def plain(setup: Setup, policy: EvictionPolicy, kinds: frozenset[Kind]) -> Ours:
    """The product's tree with another order of victims, that leaves states of these kinds only."""
    bare = replace(
        setup, block_size=1, grid=1, interval=0, opportunistic=0, dense=0, ghost_tokens=0
    )
    return Ours(bare, policy, kinds=kinds)


def make(setup: Setup) -> Ours:
    """Build it."""
    return plain(setup, ConsumedLru(), frozenset({Kind.PROMPT_END, Kind.TURN_END}))
