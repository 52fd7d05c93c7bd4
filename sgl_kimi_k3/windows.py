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
        mixed, *steps = (part[: len(indices)] for part in self._parts.values())
        rows = cache.conv[0]
        rows[:, indices] = replay.fold_rows(mixed.movedim(2, 0), rows[:, indices], accepted)
        states = cache.temporal
        for index, layer in self._layers.items():
            k, v, a, b = (part[:, :, index] for part in steps)
            gates = pointwise.gates(a, b, layer.A_log, layer.dt_bias, layer.lower_bound)
            states[index, indices] = replay.fold(k, v, *gates, states[index, indices], accepted)


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
