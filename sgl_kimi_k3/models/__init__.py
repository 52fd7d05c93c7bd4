"""The portable K3 model and its registration with SGLang."""

from __future__ import annotations

import os

ARCHITECTURES = (
    "KimiK3LinearForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM",
)


def is_portable() -> bool:
    """Whether this process serves the portable model: no CUDA, or `KIMI_K3_MODEL=portable`."""
    import torch

    return os.environ.get("KIMI_K3_MODEL") == "portable" or not torch.cuda.is_available()


def register_portable() -> None:
    """Make SGLang use the portable model and, on a CPU, our attention backends."""
    if not is_portable():
        return
    from sglang.srt.models.registry import ModelRegistry

    from sgl_kimi_k3.models.kimi_k3 import PortableKimi

    for name in ARCHITECTURES:
        ModelRegistry.models[name] = PortableKimi
    from sgl_kimi_k3.attention import register_cpu_backends

    register_cpu_backends()
