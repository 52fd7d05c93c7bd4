"""SGLang attention backends for a CPU: latent full attention and KDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def register_cpu_backends() -> None:
    """Put the CPU backends under the names SGLang looks them up by."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.linear import kda_backend

    from sgl_kimi_k3.attention.kda import KdaAttnBackend

    stock = attention_registry.ATTENTION_BACKENDS["torch_native"]

    @attention_registry.register_attention_backend("torch_native")
    def create(runner: ModelRunner) -> Any:
        from sglang.srt.configs.hybrid_arch import kimi_linear_config

        from sgl_kimi_k3.attention.mla import LatentAttnBackend

        if kimi_linear_config(runner.model_config) is None:
            return stock(runner)
        return LatentAttnBackend(runner)

    kda_backend.KDAAttnBackend = KdaAttnBackend
