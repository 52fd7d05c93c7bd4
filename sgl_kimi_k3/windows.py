"""What the steps of draft windows were fed, for the time between verifying and accepting.

A window is a request's last known token and the drafts behind it.  The forward that verifies it
reads the request's state and leaves it as it is; the inputs of every KDA layer's steps are kept
here.  Once the accepted ones are known, `fold` advances the states by exactly those, in place
(`kernels.replay`).  Both happen in one pass of the scheduler, so a request's place in the batch is
where its inputs are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_kimi_k3.kernels import pointwise, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.configs.mamba_utils import BaseLinearStateParams
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention


class Windows:
    """Inputs of all KDA layers' steps, `tokens` for each of `requests` in a batch.

    Args:
        params: SGLang's shapes and dtypes of a state.  What a step is fed is kept in the dtype of
            the convolution's rows, which must hold the model's activations exactly.
        layers: number of KDA layers here.
        requests: most requests in a batch.
        tokens: steps of a window.
        device: where.
    """

    def __init__(
        self,
        params: BaseLinearStateParams,
        *,
        layers: int,
        requests: int,
        tokens: int,
        device: torch.device | str,
    ) -> None:
        self.tokens = tokens
        self.dtype: torch.dtype = params.dtype.conv
        self._parts: dict[str, Tensor] = {
            name: torch.zeros(requests, tokens, layers, *shape, dtype=self.dtype, device=device)
            for name, shape in _step(params).items()
        }
        self._layers: dict[int, RadixLinearAttention] = {}

    def keep(self, index: int, layer: RadixLinearAttention, **parts: Tensor) -> None:
        """Note what the steps of a layer are fed.

        Args:
            index: of the layer among the KDA layers.
            layer: its gates' weights.
            parts: `mixed`, q|k|v before the convolution; `k` and `v` behind it; `a` and `b`, the
                logits of decay and beta; each with requests times tokens rows in any shape.
        """
        self._layers[index] = layer
        assert parts.keys() == self._parts.keys(), parts.keys()
        for name, values in parts.items():
            room = self._parts[name][: len(parts["mixed"]) // self.tokens, :, index]
            room.copy_(values.reshape(room.shape))

    def fold(self, cache: Any, indices: Tensor, accepted: Tensor) -> None:
        """Advance the states of a batch by the accepted steps of their windows, in place.

        Args:
            cache: SGLang's `MambaPool.State` of all layers: `conv[0]` and `temporal`.
            indices: int64 [B], physical indices of the states, each once.
            accepted: [B] steps, at least 1.
        """
        on_gpu = cache.temporal.is_cuda
        (self.fold_by_kernel if on_gpu else self.fold_in_torch)(cache, indices, accepted)

    def fold_in_torch(self, cache: Any, indices: Tensor, accepted: Tensor) -> None:
        """`fold` as `attention.kda` decodes."""
        states = cache.temporal
        self._fold_rows(cache, indices, accepted)
        k, v, a, b = (self._parts[name][: len(indices)] for name in "kvab")
        for index, layer in self._layers.items():
            gates = pointwise.gates(
                a[:, :, index], b[:, :, index], layer.A_log, layer.dt_bias, layer.lower_bound
            )
            states[index, indices] = replay.fold(
                k[:, :, index], v[:, :, index], *gates, states[index, indices], accepted
            )

    def fold_by_kernel(self, cache: Any, indices: Tensor, accepted: Tensor) -> None:
        """`fold` by the kernel that verified, which here writes states: one launch for all layers.

        It walks sequences laid end to end, so a window is two of them: the accepted steps on the
        request's state, and the others on none.  Layers are heads to it: those of a state lie end
        to end in its slot.  It is compiled anew for every power of two of tokens, so it always gets
        the room of all windows, used or not: then SGLang's own first request compiles it for good.
        """
        from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (  # noqa: PLC0415
            fused_sigmoid_gating_delta_rule_update,
        )

        states = cache.temporal
        self._fold_rows(cache, indices, accepted)
        k, v, a, b = (self._parts[name] for name in "kvab")
        layers = [self._layers[index] for index in range(len(states))]
        bounds = {layer.lower_bound for layer in layers}
        assert len(bounds) == 1, bounds
        assert states.stride(0) == states[0, 0].numel(), (states.stride(), states.shape)
        room, tokens = k.shape[:2]
        starts = torch.arange(len(indices) + 1, device=k.device, dtype=torch.int32) * tokens
        cuts = torch.stack((starts[:-1], starts[:-1] + accepted.to(torch.int32)), 1).flatten()
        slots = torch.stack((indices, torch.full_like(indices, -1)), 1).flatten()
        keys = k.reshape(1, room * tokens, -1, k.shape[-1])
        fused_sigmoid_gating_delta_rule_update(
            A_log=torch.cat([layer.A_log.flatten() for layer in layers]),
            dt_bias=torch.cat([layer.dt_bias.flatten() for layer in layers]),
            q=keys,  # what is read out of the states is not wanted
            k=keys,
            v=v.reshape(1, room * tokens, -1, v.shape[-1]),
            a=a.reshape(room * tokens, -1),
            b=b.reshape(1, room * tokens, -1),
            initial_state_source=states[0],
            initial_state_indices=slots,
            cu_seqlens=torch.cat((cuts, starts[-1:])),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=True,
            lower_bound=bounds.pop(),
        )

    def _fold_rows(self, cache: Any, indices: Tensor, accepted: Tensor) -> None:
        """Advance the convolution's rows."""
        mixed, rows = self._parts["mixed"][: len(indices)], cache.conv[0]
        rows[:, indices] = replay.fold_rows(mixed.movedim(2, 0), rows[:, indices], accepted)


def windows_of(
    tokens: int | None,
    *,
    mamba2_cache_params: BaseLinearStateParams,
    mamba_layer_ids: Sequence[int],
    max_num_reqs: int,
    device: torch.device | str,
    **_: Any,
) -> Windows | None:
    """Windows for a pool that SGLang's factory makes of these; None without drafts."""
    if tokens is None:
        return None
    layers = len(mamba_layer_ids)
    return Windows(
        mamba2_cache_params, layers=layers, requests=max_num_reqs, tokens=tokens, device=device
    )


def window_bytes(params: BaseLinearStateParams, *, layers: int, tokens: int) -> int:
    """Bytes that one request's window takes on a rank."""
    step = sum(torch.Size(shape).numel() for shape in _step(params).values())
    return int(layers * tokens * step * params.dtype.conv.itemsize)


def _step(params: BaseLinearStateParams) -> dict[str, tuple[int, ...]]:
    """Shapes of what one step of a layer is fed."""
    heads, v_dim, k_dim = (int(size) for size in params.shape.temporal)
    return {
        "mixed": (int(params.shape.conv[0][-1]),),
        "k": (heads, k_dim),
        "v": (heads, v_dim),
        "a": (heads, k_dim),
        "b": (heads,),
    }
