"""KDA over SGLang's state pool, for a CPU: what `kda_backend.KDAAttnBackend` is on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from torch import Tensor
from torch.nn import functional

from sgl_kimi_k3.kernels import pointwise
from sgl_kimi_k3.kernels.conv import conv_decode, conv_prefill
from sgl_kimi_k3.kernels.decode import kda_decode
from sgl_kimi_k3.kernels.prefill import kda_prefill

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class KdaAttnBackend(MambaAttnBackendBase):
    """Short convolution and delta rule on the live state of each request.

    The base class resolves each request's state to a physical index, once per forward; index 0 is
    the sink of padding rows.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Resolve state indices; refuse what a CPU does not run."""
        super().init_forward_metadata(forward_batch)
        if self.forward_metadata.has_mamba_track_mask:
            raise ValueError(
                "states are not captured inside a chunk on the CPU: use "
                "--mamba-radix-cache-strategy no_buffer"
            )
        self.indices = self.forward_metadata.mamba_cache_indices.to(torch.int64)

    def forward_decode(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        **_: Any,
    ) -> Tensor:
        """One token per request.

        Args:
            layer: the layer's gates and convolution weights.
            forward_batch: unused, the state indices are those of `init_forward_metadata`.
            mixed_qkv: [B, q|k|v], before the convolution.
            a: [B, H * K], the forget gate's logits.
            b: [1, B, H], beta's logits.

        Returns:
            [1, B, H, V].
        """
        del forward_batch
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        rows, states = cache.conv[0], cache.temporal
        mixed, rows[self.indices] = conv_decode(mixed_qkv, layer.conv_weights, rows[self.indices])
        out, new = kda_decode(*_operands(layer, mixed, a, b), states[self.indices])
        states[self.indices] = new
        return out[None].to(mixed_qkv.dtype)

    def forward_extend(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        **_: Any,
    ) -> Tensor:
        """Requests laid end to end: as `forward_decode`, with a [1, T, H, K] and T tokens."""
        if forward_batch.forward_mode.is_target_verify():
            return self._verify(layer, mixed_qkv, a, b)
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        lens = forward_batch.extend_seq_lens_cpu
        depths = forward_batch.extend_prefix_lens_cpu
        # A request resumes a state iff tokens precede it, however few it brings itself. Others
        # start from zeros, whatever bytes their slot still holds.
        resumed = torch.tensor([depth > 0 for depth in depths])
        rows = _kept(cache.conv[0][self.indices], resumed)
        states = _kept(cache.temporal[self.indices], resumed)
        tokens = sum(lens)  # rows behind them pad the batch to the other ranks' size
        mixed = torch.empty_like(mixed_qkv[:tokens])
        start = 0
        for i, length in enumerate(lens):
            part = slice(start, start + length)
            mixed[part], rows[i] = conv_prefill(mixed_qkv[part], layer.conv_weights, rows[i])
            start += length
        out, final = kda_prefill(
            *_operands(layer, mixed, a[:, :tokens], b[:, :tokens]),
            states=states,
            lens=lens,
            depths=depths,
        )
        cache.conv[0][self.indices] = rows
        cache.temporal[self.indices] = final.to(cache.temporal.dtype)
        out = functional.pad(out, (0, 0, 0, 0, 0, len(mixed_qkv) - tokens))
        return out[None].to(mixed_qkv.dtype)

    def _verify(
        self, layer: RadixLinearAttention, mixed_qkv: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:
        """A draft window per request, step by step as `forward_decode`; no state is changed.

        What the steps are fed is kept in `windows` until it is known which of them count.
        """
        pool = self.req_to_token_pool
        cache, windows = pool.mamba2_layer_cache(layer.layer_id), pool.windows
        shape = (len(self.indices), windows.tokens)
        rows, states = cache.conv[0][self.indices], cache.temporal[self.indices]
        mixed = mixed_qkv.unflatten(0, shape)
        convolved = torch.empty_like(mixed)
        for step in range(windows.tokens):
            convolved[:, step], rows = conv_decode(mixed[:, step], layer.conv_weights, rows)
        operands = _operands(layer, convolved.flatten(0, 1), a, b)
        q, k, v, log_a, beta = (part.unflatten(0, shape) for part in operands)
        out = q.new_empty(*shape, *v.shape[2:], dtype=torch.float64)
        for step in range(windows.tokens):
            inputs = (part[:, step] for part in (q, k, v, log_a, beta))
            out[:, step], states = kda_decode(*inputs, states)
        index = pool.mamba_map[layer.layer_id]
        windows.keep(index, layer, mixed=mixed_qkv, k=k, v=v, a=a, b=b)
        return out.flatten(0, 1)[None].to(mixed_qkv.dtype)


def _kept(values: Tensor, resumed: Tensor) -> Tensor:
    shape = (-1,) + (1,) * (values.dim() - 1)
    return torch.where(resumed.to(values.device).view(shape), values, values.new_zeros(()))


def _operands(
    layer: RadixLinearAttention, mixed: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [T, H, K], v [T, H, V], log decay [T, H, K] and beta [T, H]."""
    q, k, v = mixed.split((layer.q_dim, layer.k_dim, layer.v_dim), -1)
    heads = (layer.num_k_heads, layer.head_k_dim)
    log_a, beta = pointwise.gates(
        a.reshape(-1, *heads),
        b.reshape(-1, layer.num_k_heads),
        layer.A_log,
        layer.dt_bias,
        layer.lower_bound,
    )
    return (
        q.unflatten(-1, heads),
        k.unflatten(-1, heads),
        v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
        log_a,
        beta,
    )
