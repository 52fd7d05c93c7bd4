"""SGLang attention backends for a CPU: latent full attention and KDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kimi_k3.attention.mla import LatentAttnBackend


def register_cpu_backends() -> None:
    """Put the CPU backends under the names SGLang looks them up by; idempotent.

    The portable model calls this when it is built, so stock's backends stay in place for every
    other model. SGLang builds its backends after the model.
    """
    # The registry imports most of SGLang, and the model registry imports this package.
    from sglang.srt.layers.attention import attention_registry  # noqa: PLC0415
    from sglang.srt.layers.attention.linear import kda_backend  # noqa: PLC0415
    from sglang.srt.model_executor import forward_batch_info  # noqa: PLC0415

    from sgl_kimi_k3.attention.kda import KdaAttnBackend  # noqa: PLC0415

    attention_registry.register_attention_backend("torch_native")(_create_latent)
    kda_backend.KDAAttnBackend = KdaAttnBackend
    # The PyPI SGLang takes no machine for a CPU.  Where data-parallel ranks bring their batches to
    # one size it would pin memory, which needs a driver.
    forward_batch_info._is_cpu = True  # noqa: SLF001


def _create_latent(runner: ModelRunner) -> LatentAttnBackend:
    from sgl_kimi_k3.attention.mla import LatentAttnBackend  # noqa: PLC0415

    return LatentAttnBackend(runner)
