"""What the cache needs of a pool. `mempool.Pool` fits structurally."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from radix.tokens import IdArray


class GrantLike(Protocol):
    """Ids handed out by a pool."""

    @property
    def states(self) -> IdArray:
        """State ids."""
        ...

    @property
    def blocks(self) -> IdArray:
        """Block ids."""
        ...


class PoolPort(Protocol):
    """Room for states and blocks in one arena.

    What is freed through this port must count as room for the next `fits` and `alloc`.
    """

    def fits(self, states: int, blocks: int) -> bool:
        """Whether `alloc` would succeed."""
        ...

    def fits_after(self, states: int, blocks: int, *, freed_states: int, freed_blocks: int) -> bool:
        """Whether `alloc` would succeed once that many live ids were freed."""
        ...

    def alloc(self, states: int, blocks: int) -> GrantLike | None:
        """All or nothing; None changes nothing."""
        ...

    def free(self, states: IdArray, blocks: IdArray) -> None:
        """Take ids back."""
        ...
