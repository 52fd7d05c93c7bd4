"""What the tree knows of a prompt, as the frozen value that admission works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.tree import Tree, Walk
from radix.values import Match

if TYPE_CHECKING:
    from collections.abc import Hashable

    from radix.checkpoint import Checkpoint
    from radix.node import Node
    from radix.tokens import Key

_NOWHERE = Walk((), None, 0, 0)


def find(
    tree: Tree, root: Node | None, key: Key, namespace: Hashable, *, cap: int, grid: int
) -> Match:
    """Follow `key` from `root` (None: nothing is known); resume at `cap` at most. Pure."""
    walk = _NOWHERE if root is None else tree.walk(root, key)
    usable = (n for n in reversed(walk.path) if n.checkpoint is not None and n.end <= cap)
    node = next(usable, None)
    resume = 0 if node is None else node.end
    checkpoint = None if node is None else node.checkpoint
    reach = min(walk.matched_len, cap)
    junction = reach - reach % grid
    passed = walk.path if walk.partial is None else (*walk.path, walk.partial)
    last = passed[-1] if passed else None
    return Match(
        namespace=namespace,
        matched_len=walk.matched_len,
        resident_len=walk.resident_len,
        resume_len=resume,
        junction=junction if junction > resume <= reach - grid else None,
        slot=None if checkpoint is None else checkpoint.slot,
        prompt_len=len(key),
        limit=cap,
        diverged=walk.partial is not None or bool(last is not None and last.children),
        kind=None if checkpoint is None else checkpoint.kind,
        node=node,
        missed=tuple(c for n in passed for c in n.lost if resume < c.depth <= reach),
        refused=max((d for n in passed for d in n.refused if resume < d <= reach), default=0),
    )


def resumed(match: Match) -> Checkpoint | None:
    """The checkpoint that a match resumes from, if the tree still has it."""
    checkpoint = None if match.node is None else match.node.checkpoint
    return None if checkpoint is None or checkpoint.slot != match.slot else checkpoint
