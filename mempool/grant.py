"""What an allocation hands out, and what it asks to be done with the bytes first."""

from dataclasses import dataclass

from mempool.ids import IdArray, Side


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the units at `sources` to `targets`, pairwise physical indices of one side.

    The two are disjoint. Moves apply in the order given, on the forward stream, before the forward
    that reads them; the id table already names the targets.
    """

    side: Side
    sources: IdArray
    targets: IdArray


@dataclass(frozen=True, slots=True)
class Grant:
    """Ids handed out, and what the executor must do before a kernel reads them, in this order.

    `moves` first, then zero the units `stale_states` and `stale_blocks`: physical indices of the
    granted ones whose bytes last belonged to the other end, and of free blocks beyond them that
    later grants need not zero then.
    """

    states: IdArray
    blocks: IdArray
    moves: tuple[Move, ...]
    stale_states: IdArray
    stale_blocks: IdArray
