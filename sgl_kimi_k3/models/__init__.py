"""The portable K3 model: plain torch behind SGLang's model interface.

SGLang scans this package for model classes (`SGLANG_EXTERNAL_MODEL_PACKAGE`); `kimi_k3` has them.
"""

from __future__ import annotations

import os
import sys

import torch

ARCHITECTURES = (
    "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "KimiLinearForCausalLM",
)
_EXTERNAL_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def is_portable() -> bool:
    """Whether this process serves the portable model: no CUDA, or `KIMI_K3_MODEL=portable`."""
    return os.environ.get("KIMI_K3_MODEL") == "portable" or not torch.cuda.is_available()


def register_portable() -> None:
    """Make SGLang resolve K3's architectures to the portable model; call before a model loads.

    Nothing of SGLang is imported unless its model registry already is. Naming an external package
    also keeps the registry from importing its some 200 model files, which takes longer than
    everything else of a start on a CPU. No effect where stock's model is to be served.
    """
    if not is_portable():
        return
    # A bf16 window of raw float32 inputs would make a resumed sequence differ from a whole one.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    taken = os.environ.get(_EXTERNAL_PACKAGE, __name__) != __name__
    if not taken:
        os.environ[_EXTERNAL_PACKAGE] = __name__
    if taken or "sglang.srt.models.registry" in sys.modules:
        from sglang.srt.models.registry import ModelRegistry  # noqa: PLC0415  # slow to import

        ModelRegistry.register(__name__, overwrite=True, strict=True)
