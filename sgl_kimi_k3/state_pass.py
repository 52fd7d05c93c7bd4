"""States written inside a prefill pass, at any number of its chunk ends.

Stock's Triton KDA prefill walks a sequence chunk by chunk (64 tokens), holds the fp32 state while
it does, and can put aside one such state per sequence and forward.  `pass_states` is the same walk
with a table that names, for every chunk of the batch, the slot its entry state goes to, or -1.  So
a prompt leaves as many exact states as there is memory for, and no chunk is cut for them.

A forward that writes states runs under `writing(plan)`; the hooks below read it there.  SGLang
runs one forward at a time in a process.  A prefill that a CUDA graph replays reads the plan from
tables of a fixed place instead (`prefill_graphs`).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from mempool.storage import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

CHUNK = 64  # tokens, `sglang.kernels.ops.attention.fla.chunk_delta_h.CHUNK_SIZE`
# Tile and launch shape of stock's kernel (`GDN_CHUNK_H_*`), so that both round alike.
VALUE_TILE = 32
WARPS = 4
STAGES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Which states one forward writes.

    Chunks are counted per sequence (a sequence of n tokens has ceil(n / 64)), sequences in batch
    order.

    Attributes:
        chunks: of the whole batch.
        firsts: int64 [sequences], the first chunk of each.
        places: int64 [M], the chunks whose entry states are written.
        slots: int64 [M], the physical state index each is written to.
        ends: int64 [M], how many of the batch's tokens lie before each.
    """

    chunks: int
    firsts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        wanted: Sequence[tuple[int, int, int]],
        chunk: int = CHUNK,
    ) -> Plan:
        """From what the scheduler knows.

        Args:
            lengths: tokens of each sequence of the batch.
            wanted: (sequence, tokens of it before the state, physical index); the tokens are a
                positive multiple of `chunk` below the sequence's length.
            chunk: the kernel's, in tokens.
        """
        firsts = np.cumsum([0, *(-(-length // chunk) for length in lengths)], dtype=np.int64)
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        for sequence, tokens, _ in wanted:
            assert tokens % chunk == 0 < tokens < lengths[sequence], (tokens, lengths[sequence])
        rows, tokens, slots = np.array(wanted, dtype=np.int64).reshape(-1, 3).T
        places = firsts[rows] + tokens // chunk
        return cls(int(firsts[-1]), firsts[:-1], places, slots, starts[rows] + tokens)

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """int64 [chunks]: the state index that each chunk's entry state is written to, or -1."""
        table = np.full(self.chunks, -1, dtype=np.int64)
        table[self.places] = self.slots
        return table

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """`targets`, `firsts`, `slots` and `ends` as tensors, by one upload that does not wait.

        Each begins at a multiple of 16 bytes, or Triton would compile once more for where it lies.
        """
        arrays = (self.targets, self.firsts, self.slots, self.ends)
        starts = np.cumsum([0, *(len(one) + len(one) % 2 for one in arrays)])
        spans = [slice(start, start + len(one)) for start, one in zip(starts, arrays, strict=False)]
        packed = np.zeros(starts[-1], dtype=np.int64)
        for span, one in zip(spans, arrays, strict=True):
            packed[span] = one
        table = upload(packed, device)
        return tuple(table[span] for span in spans)


@dataclass(slots=True)
class Writing:
    """A forward that shall write the plan's states, and whether its layers did."""

    plan: Plan
    device: torch.device
    convolved: bool = False  # the convolution's rows
    walked: bool = False  # the recurrent states
    _uploaded: tuple[torch.Tensor, ...] | None = None

    @property
    def done(self) -> bool:
        """Whether the slots hold states.  False where a kernel ran that knows no plan."""
        return self.convolved and self.walked

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """The plan on the device, uploaded once, as the first layer asks."""
        if self._uploaded is None:
            self._uploaded = self.plan.on(self.device)
        return self._uploaded


_current: Writing | None = None


def current() -> Writing | None:
    """The forward that runs, if it writes states."""
    return _current


@contextmanager
def writing(plan: Plan, device: torch.device) -> Iterator[Writing]:
    """Run one forward on `device` that writes the plan's states."""
    global _current  # noqa: PLW0603  # one forward at a time in a process
    assert _current is None, "a forward inside a forward"
    _current = Writing(plan, device)
    try:
        yield _current
    finally:
        _current = None


def metadata(original: Callable[..., None], backend: Any, forward_batch: Any) -> None:
    """AROUND `KDAAttnBackend.init_forward_metadata`: conv rows of the plan's states.

    The backend copies the rows `track_conv_indices` of its input, before the convolution, to the
    slots `conv_states_mask_indices` in every layer; SGLang fills one row per request, any number
    will do.
    """
    original(backend, forward_batch)
    if _current is None or not forward_batch.forward_mode.is_extend_without_speculative():
        return
    _, _, slots, ends = _current.tables
    found = backend.forward_metadata
    assert not found.has_mamba_track_mask, "another part of SGLang tracks states in this forward"
    width = backend.conv_states_shape[-1]  # rows that the convolution looks back
    found.has_mamba_track_mask = True
    found.conv_states_mask_indices = slots
    found.track_conv_indices = ends[:, None] + torch.arange(-width, 0, device=ends.device)
    none = slots[:0]
    found.track_ssm_h_src = found.track_ssm_final_src = none
    found.track_chunk_idx = found.track_ssm_recompute_dst = None
    _current.convolved = True


def chunk_states(original: Callable[..., Any], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`fla.kda.chunk_gated_delta_rule_fwd_h` outside of graphs: ours where it writes states."""
    if _current is None:
        return original(**kwargs)
    _current.walked = True
    targets, firsts, _, _ = _current.tables
    return walk(targets, firsts, **kwargs)


def walk(
    targets: torch.Tensor, firsts: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pass_states` with the arguments of stock's `chunk_gated_delta_rule_fwd_h`."""
    assert kwargs["use_exp2"], "KDA's gates are powers of 2"
    assert kwargs["cu_seqlens"] is not None, "KDA's prefill lays sequences end to end"
    return pass_states(
        kwargs["k"],
        kwargs["w"],
        kwargs["u"],
        kwargs["gk"],
        states=kwargs["initial_state"],
        rows=kwargs["initial_state_indices"],
        starts=kwargs["cu_seqlens"],
        targets=targets,
        firsts=firsts,
    )


def pass_states(  # the operands of one pass
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    gk: torch.Tensor,
    *,
    states: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    targets: torch.Tensor,
    firsts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk N sequences chunk by chunk, advance their states and write the ones asked for.

    Per chunk, with the state S [V, K] at its entry (Kimi Linear, arXiv 2510.26692, section 3):
    `v_new = u - w S^T`; `S = S * 2^gk[last] + v_new^T k`.

    Args:
        k: [1, T, H, K] keys scaled by what decays between them and the chunk's end.
        w: [1, T, H, K], the chunk's WY factor of the keys.
        u: [1, T, H, V], of the values.
        gk: fp32 [1, T, H, K], log2 of the decay since the chunk's start, cumulative.
        states: [slots, H, V, K], any stride between slots; rows of `rows` are advanced in place,
            rows of `targets` are written.
        rows: int [N], the sequences' own states; -1 starts from zero and keeps nothing.
        starts: int [N + 1], where sequences begin among the T tokens; one may be empty.
        targets: int64 [chunks], see `Plan`.
        firsts: int [N or more], where each sequence's chunks begin in it.

    Returns:
        The entry states in k's dtype, [1, chunks, H, V, K], and v_new [1, T, H, V].
    """
    heads, key_size, value_size = w.shape[2], w.shape[3], u.shape[3]
    entries = k.new_empty(1, len(targets), heads, value_size, key_size)
    v_new = torch.empty_like(u)
    sequences = len(starts) - 1
    # One axis: the others end at 65,535, about 680 sequences of 96 heads.
    _pass[(triton.cdiv(value_size, VALUE_TILE) * sequences * heads,)](
        k,
        w,
        u,
        gk,
        entries,
        v_new,
        states,
        states.stride(0),
        rows,
        starts,
        targets,
        firsts,
        HEADS=heads,
        KEYS=key_size,
        VALUES=value_size,
        TILE=VALUE_TILE,
        TOKENS=CHUNK,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return entries, v_new


def warm_up(states: torch.Tensor, dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    """Compile and load the kernel for one layer's `states` [slots, H, V, K]; no state changes.

    One sequence of one token whose state is nobody's (row -1).

    Args:
        states: any layer's; all have these sizes and strides.
        dtype: of the layers' activations.
        rows_dtype: of the state indices that a forward passes.
    """
    _, heads, value_size, key_size = states.shape
    keys = states.new_zeros(1, 1, heads, key_size, dtype=dtype)
    pass_states(
        keys,
        keys,
        states.new_zeros(1, 1, heads, value_size, dtype=dtype),
        keys.float(),
        states=states,
        rows=torch.full((1,), -1, dtype=rows_dtype, device=states.device),
        starts=torch.tensor([0, 1], dtype=torch.int32, device=states.device),
        targets=torch.full((1,), -1, dtype=torch.int64, device=states.device),
        firsts=torch.zeros(1, dtype=torch.int64, device=states.device),
    )


# No annotations but Triton's own: its compiler resolves them as globals.
@triton.jit
def _pass(  # noqa: ANN202
    k,  # noqa: ANN001
    w,  # noqa: ANN001
    u,  # noqa: ANN001
    gk,  # noqa: ANN001
    entries,  # noqa: ANN001
    v_new,  # noqa: ANN001
    states,  # noqa: ANN001
    slot_stride,  # noqa: ANN001
    rows,  # noqa: ANN001
    starts,  # noqa: ANN001
    targets,  # noqa: ANN001
    firsts,  # noqa: ANN001
    HEADS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    VALUES: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
):
    tile = tl.program_id(0) % tl.cdiv(VALUES, TILE)
    walk = tl.program_id(0) // tl.cdiv(VALUES, TILE)
    sequence = walk // HEADS
    head = walk % HEADS
    begin = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64)
    if begin == end:  # a row that only fills up a graph's tables
        return
    chunk = tl.load(firsts + sequence).to(tl.int64)

    key = tl.arange(0, KEYS)
    value = tile * TILE + tl.arange(0, TILE)
    token = tl.arange(0, TOKENS)
    cell = (head * VALUES + value[:, None]) * KEYS + key[None, :]
    held = (value < VALUES)[:, None] & (key < KEYS)[None, :]
    row = tl.load(rows + sequence).to(tl.int64)
    live = states + row * slot_stride + cell
    state = tl.load(live, mask=held & (row >= 0), other=0.0).to(tl.float32)

    for first in range(begin, end, TOKENS):
        at = chunk * (HEADS * VALUES * KEYS) + cell
        tl.store(entries + at, state.to(entries.dtype.element_ty), mask=held)
        target = tl.load(targets + chunk)
        tl.store(
            states + target * slot_stride + cell,
            state.to(states.dtype.element_ty),
            mask=held & (target >= 0),
        )
        place = (first + token) * HEADS + head
        known = first + token < end
        by_key = place[:, None] * KEYS + key[None, :]
        by_value = place[:, None] * VALUES + value[None, :]
        seen = known[:, None] & (value < VALUES)[None, :]
        factor = tl.load(w + by_key, mask=known[:, None], other=0.0)
        new = tl.load(u + by_value, mask=seen, other=0.0) - tl.dot(
            factor, tl.trans(state).to(factor.dtype)
        )
        tl.store(v_new + by_value, new.to(v_new.dtype.element_ty), mask=seen)
        last = (tl.minimum(first + TOKENS, end) - 1) * HEADS + head
        state *= tl.exp2(tl.load(gk + last * KEYS + key))[None, :]
        keys = tl.load(k + by_key, mask=known[:, None], other=0.0)
        state += tl.trans(tl.dot(tl.trans(keys), new.to(keys.dtype)))
        chunk += 1

    tl.store(live, state.to(states.dtype.element_ty), mask=held & (row >= 0))
