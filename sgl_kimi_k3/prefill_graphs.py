"""States written inside a prefill that a CUDA graph replays.

SGLang captures the body of a prefill once for each of some token counts, its buckets, and replays
it for every batch that pads into one: a replay costs the host a fraction of launching every kernel
of every layer.  A captured KDA layer reads tables of a fixed place, filled before each replay
(`layers/attention/linear/kda_prefill_graph.py`); stock's have room for one state per request.
Ours name a slot, or none, for every chunk, so a replay leaves what the same forward would leave
outside of a graph.

The hooks run when a bucket is captured, and `filled` before each replay too.  SGLang captures and
runs one forward at a time in a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.kernels.ops.mamba.kda_prefill_track import TRACK_CHUNK_STATE, kda_track_conv_window

from mempool.storage import upload
from sgl_kimi_k3 import state_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from sgl_kimi_k3.state_pass import Plan

NONE = -1


@dataclass(slots=True)
class Tables:
    """What the KDA layers of one bucket read of a plan; the tensors stay where they are.

    A bucket has more chunks than most of its batches: the rows behind a batch's own name no slot.

    Attributes:
        rows: int64 [3, chunks]: the physical index of the state that a chunk's entry state is
            written to, or -1; `TRACK_CHUNK_STATE` where there is one, else 0; the first of the
            batch's tokens in the convolution's rows there.
        empty: whether no row names a slot.
        convolved: whether the captured layers write the convolution's rows.
        walked: whether they write the recurrent states.
    """

    rows: torch.Tensor
    empty: bool = True
    convolved: bool = False
    walked: bool = False

    @classmethod
    def of(cls, chunks: int, device: torch.device) -> Tables:
        """For a bucket of at most so many chunks; they name no slot.

        Rows begin at multiples of 16 bytes, or Triton would compile once more for where they lie.
        """
        rows = torch.zeros(3, chunks + chunks % 2, dtype=torch.int64, device=device)[:, :chunks]
        rows[0] = NONE
        return cls(rows)

    def fill(self, plan: Plan | None, conv_rows: int) -> None:
        """Name the plan's slots for the next replay.

        Args:
            plan: of a batch that fits the bucket; None writes no state.
            conv_rows: rows that the convolution looks back.
        """
        if plan is None and self.empty:
            return
        table = np.zeros(self.rows.shape, dtype=np.int64)
        table[0] = NONE
        if plan is not None:
            table[0, plan.places] = plan.slots
            table[1, plan.places] = TRACK_CHUNK_STATE
            table[2, plan.places] = plan.ends - conv_rows
        self.rows.copy_(upload(table, self.rows.device), non_blocking=True)
        self.empty = plan is None


_filled: Tables | None = None  # of the bucket that is captured or replayed next
_walking: Tables | None = None  # whose layer is being captured


def fill(original: Callable[..., None], backend: Any, **kwargs: Any) -> None:
    """AROUND `KDAAttnBackend._fill_prefill_graph_metadata`: the plan of the coming forward.

    Runs before a bucket is captured, and before each of its replays.
    """
    global _filled  # noqa: PLW0603  # one forward at a time in a process
    original(backend, **kwargs)
    meta = kwargs["meta"]
    buckets = vars(backend).setdefault("kimi_k3_tables", {})
    if meta.num_tokens not in buckets:
        buckets[meta.num_tokens] = Tables.of(len(meta.chunk_indices), meta.packed.device)
    _filled = buckets[meta.num_tokens]
    writing = state_pass.current()
    _filled.fill(writing and writing.plan, backend.conv_states_shape[-1])
    if writing is not None:
        writing.convolved, writing.walked = _filled.convolved, _filled.walked


def extend(original: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """AROUND `kda_backend.kda_extend_in_graph`: a captured layer that writes the plan's states.

    The convolution's rows are copied from its input, by the kernel that copies stock's.

    Stock tells by the gate's shape whether beta still needs its sigmoid.  K3's and Kimi Linear's
    layers pass the gate by heads and beta raw, which stock takes as done (its eager forward does
    not): in its graphs these models compute something else.  Here both are passed raw.
    """
    global _walking  # noqa: PLW0603  # one layer at a time
    assert _filled is not None, "a bucket is captured before its tables are filled"
    meta = kwargs["meta"]
    if kwargs["a"].ndim == 4:  # [1, tokens, heads, size]
        kwargs["a"] = kwargs["a"].flatten(2)
    slots, modes, starts = _filled.rows
    kda_track_conv_window(
        conv_pool=kwargs["conv_pool"],
        x=kwargs["mixed_qkv"],
        track_mode=modes,
        track_conv_start=starts,
        track_dst=slots,
        num_tokens=meta.num_logical_tokens,
    )
    _filled.convolved = True
    _walking = _filled
    try:
        return original(**kwargs)
    finally:
        _walking = None


def chunk_states(original: Callable[..., Any], **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """AROUND `fla.kda.chunk_gated_delta_rule_fwd_h`, in a graph and outside of one."""
    if _walking is None:
        return state_pass.chunk_states(original, **kwargs)
    _walking.walked = True
    return state_pass.walk(_walking.rows[0], kwargs["chunk_offsets"], **kwargs)
