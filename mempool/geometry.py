"""Sizes and byte positions of one arena; pure integers, no array, no tensor.

Both kinds are anchored at byte 0, as SGLang's strided views are: the state with index i lives at
`[i * state_bytes, (i + 1) * state_bytes)`, the block with index j at
`[j * block_bytes, (j + 1) * block_bytes)`. States take indices upwards from `state_first`, blocks
downwards from `block_last`. A *position* counts from the own end: state index = state_first + p,
block index = block_last - p.
"""

from dataclasses import dataclass, field

ROW_ALIGN_BYTES = 16  # SGLang 0.5.23 mem_cache/layout/token_major.py ROW_ALIGN_BYTES
ENTRY_ALIGN_BYTES = 32  # the same file's ENTRY_ALIGN_BYTES, one token's rows over all layers
INDEX_LIMIT = 2**31  # SGLang's read-index buffers are int32


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one arena.

    Args:
        total_bytes: the whole arena, sink included.
        state_bytes: one KDA state over all layers of this rank.
        block_bytes: one block of MLA rows over all layers of this rank.
        block_size: tokens per block.
        sink_bytes: reserved from byte 0, where padding rows write; 0 means one state or one block,
            whichever is larger.

    Raises:
        ValueError: a size is not positive, an index would pass int32, or the arena cannot hold
            one state or one block beside the sink.

    >>> geometry = Geometry(total_bytes=130, state_bytes=30, block_bytes=10, block_size=1)
    >>> geometry.max_states, geometry.max_blocks
    (3, 10)
    """

    total_bytes: int
    state_bytes: int
    block_bytes: int
    block_size: int
    sink_bytes: int = 0
    state_first: int = field(init=False)
    block_first: int = field(init=False)
    block_last: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("total_bytes", "state_bytes", "block_bytes", "block_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.sink_bytes < 0:
            raise ValueError(f"sink_bytes must not be negative, got {self.sink_bytes}")
        put = object.__setattr__
        put(self, "sink_bytes", self.sink_bytes or max(self.state_bytes, self.block_bytes))
        put(self, "state_first", _ceil_div(self.sink_bytes, self.state_bytes))
        put(self, "block_first", _ceil_div(self.sink_bytes, self.block_bytes))
        put(self, "block_last", self.total_bytes // self.block_bytes - 1)
        if self.max_states < 1 or self.max_blocks < 1:
            floor = self.floor_bytes(states=1, blocks=0), self.floor_bytes(states=0, blocks=1)
            raise ValueError(
                f"an arena of {self.total_bytes} bytes lacks {max(floor) - self.total_bytes} bytes "
                f"to hold one state or one block beside the sink of {self.sink_bytes} bytes"
            )
        tokens = (self.block_last + 1) * self.block_size
        if tokens >= INDEX_LIMIT:
            raise ValueError(
                f"{tokens} token rows pass the int32 limit {INDEX_LIMIT} of SGLang's read indices; "
                f"make the arena smaller (--mem-fraction-static)"
            )

    @classmethod
    def of_model(
        cls, total_bytes: int, *, block_size: int = 64, dcp: int = 1, **sizes: int
    ) -> "Geometry":
        """The arena of a KDA / MLA hybrid on one rank; `sizes` are those of `unit_bytes`.

        Rows are spread over `dcp` ranks, so one block holds `block_size * dcp` tokens of which this
        rank stores `block_size`.

        Raises:
            ValueError: as `unit_bytes` and the constructor.
        """
        if dcp < 1:
            raise ValueError(f"--dcp-size must be positive, got {dcp}")
        state_bytes, token_bytes = unit_bytes(**sizes)
        return cls(
            total_bytes=total_bytes,
            state_bytes=state_bytes,
            block_bytes=block_size * token_bytes,
            block_size=block_size * dcp,
        )

    @property
    def max_states(self) -> int:
        """States the arena holds when it holds no block."""
        return self.states_below(self.total_bytes)

    @property
    def max_blocks(self) -> int:
        """Blocks the arena holds when it holds no state."""
        return self.block_last - self.block_first + 1

    def state_end(self, count: int) -> int:
        """First byte above the lowest `count` state positions."""
        return (self.state_first + count) * self.state_bytes if count else self.sink_bytes

    def block_start(self, count: int) -> int:
        """First byte of the highest `count` block positions; the top of the arena for none."""
        return (self.block_last + 1 - count) * self.block_bytes if count else self.total_bytes

    def states_below(self, byte: int) -> int:
        """How many state positions end at or below `byte`."""
        return max(byte // self.state_bytes - self.state_first, 0)

    def blocks_above(self, byte: int) -> int:
        """How many block positions start at or above `byte`."""
        return max(self.block_last + 1 - _ceil_div(byte, self.block_bytes), 0)

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return _ceil_div(tokens, self.block_size)

    def floor_bytes(self, *, states: int, blocks: int) -> int:
        """Smallest arena that holds so many states and blocks at once, sink included."""
        low = self.state_end(states)
        return (_ceil_div(low, self.block_bytes) + blocks) * self.block_bytes if blocks else low

    def require(self, *, states: int, blocks: int, flag: str = "--mem-fraction-static") -> None:
        """Refuse an arena too small for so many states and blocks at once.

        Raises:
            ValueError: naming the needed and the missing bytes and the flag to raise.
        """
        needed = self.floor_bytes(states=states, blocks=blocks)
        if needed > self.total_bytes:
            raise ValueError(
                f"one request needs {states} states and {blocks} blocks, {needed} bytes with the "
                f"sink of {self.sink_bytes}; the pool has {self.total_bytes}: "
                f"{needed - self.total_bytes} bytes are missing, raise {flag}"
            )


def unit_bytes(
    *,
    n_kda: int,
    n_mla: int,
    num_heads: int,
    head_dim: int,
    conv_kernel: int = 4,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    state_itemsize: int = 4,
    conv_itemsize: int = 2,
    kv_itemsize: int = 2,
    tp: int = 1,
) -> tuple[int, int]:
    """Bytes of one state and of one token's rows on one rank, all layers of each kind.

    State: n_kda x ((conv_kernel - 1) x 3HD/tp conv rows + H/tp x D x D), as SGLang's
    `KimiLinearStateShape`; heads are split over `tp`. Rows: n_mla x (kv_lora_rank + rope_dim),
    replicated over `tp`.

    Raises:
        ValueError: heads do not divide by `tp`, or a row breaks SGLang's alignment.

    >>> unit_bytes(n_kda=69, n_mla=24, num_heads=96, head_dim=128, tp=8)
    (56171520, 27648)
    """
    if tp < 1 or num_heads % tp:
        raise ValueError(f"--tp-size {tp} must divide the {num_heads} KDA heads")
    heads = num_heads // tp
    conv = (conv_kernel - 1) * 3 * heads * head_dim * conv_itemsize
    recurrent = heads * head_dim * head_dim * state_itemsize
    row = (kv_lora_rank + rope_dim) * kv_itemsize
    if row % ROW_ALIGN_BYTES:
        raise ValueError(
            f"one MLA row is {row} bytes, not a multiple of {ROW_ALIGN_BYTES}: "
            f"choose another --kv-cache-dtype"
        )
    entry = _ceil_div(n_mla * row, ENTRY_ALIGN_BYTES) * ENTRY_ALIGN_BYTES
    return n_kda * (conv + recurrent), entry


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)
