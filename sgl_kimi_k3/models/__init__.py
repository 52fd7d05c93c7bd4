"""The portable K3 model: plain torch behind SGLang's model interface.

SGLang scans this package for model classes (`SGLANG_EXTERNAL_MODEL_PACKAGE`); `kimi_k3` has them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.configs.mamba_utils import Mamba2StateDType

_EXTERNAL_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def is_portable() -> bool:
    """Whether this process serves the portable model: no CUDA, or `KIMI_K3_MODEL=portable`."""
    return os.environ.get("KIMI_K3_MODEL") == "portable" or not torch.cuda.is_available()


def register_portable() -> None:
    """Make SGLang resolve K3's architectures to the portable model; call before a model loads.

    Naming an external package also keeps SGLang's registry from importing its some 200 model files,
    which takes longer than everything else of a start on a CPU. No effect where stock's model is to
    be served.
    """
    if not is_portable():
        return
    taken = os.environ.get(_EXTERNAL_PACKAGE, __name__) != __name__
    if not taken:
        os.environ[_EXTERNAL_PACKAGE] = __name__
    if taken or "sglang.srt.models.registry" in sys.modules:
        from sglang.srt.models.registry import ModelRegistry  # noqa: PLC0415  # slow to import

        ModelRegistry.register(__name__, overwrite=True, strict=True)
    if not torch.cuda.is_available():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

        HookRegistry.register(
            "sglang.srt.configs.mamba_utils.mamba2_state_dtype",
            exact_state_dtype,
            HookType.AROUND,
        )


def exact_state_dtype(
    stock: Callable[..., Mamba2StateDType], *args: Any, **kwargs: Any
) -> Mamba2StateDType:
    """State types under which a resumed sequence is the whole one, bit for bit; hook on `stock`.

    A state is reached by chunks or by steps, cut anywhere: the ways differ by what its stored type
    rounds. In float64 that is far below what the float32 results of a layer can show. Raw rows of
    the convolution lose nothing in float32, but would in bfloat16, stock's default. An explicit
    `--mamba-ssm-dtype` or `SGLANG_MAMBA_CONV_DTYPE` is left alone.
    """
    dtypes = stock(*args, **kwargs)
    if os.environ.get("SGLANG_MAMBA_SSM_DTYPE") is None:
        dtypes = dataclasses.replace(dtypes, temporal=torch.float64)
    if os.environ.get("SGLANG_MAMBA_CONV_DTYPE") is None:
        dtypes = dataclasses.replace(dtypes, conv=torch.float32)
    return dtypes
