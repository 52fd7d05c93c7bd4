"""Random weights under which a model's answer depends on its whole prompt; an SGLang plugin.

`--load-format dummy` draws every weight from +-0.001, norms too: whatever the layers compute is
lost beside the embedding, and the next token depends on the last one alone.  A server whose states
are wrong then gives the right answers.  Servers of the benchmarks load these weights instead, by
the entry point in `tests/bench/entry`, which is on their path (`servers.py`).
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SMALLEST_BITS = 16  # narrower ones are quantized; they and their scales stay as SGLang draws them
ROUTER_BIAS = "e_score_correction_bias"
DECAY_BIAS = -5.6  # a state forgets half of a token in some 190 (Kimi Linear) or 40 (K3)


def load() -> None:
    """Register the hook, in each of the server's processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(target, initialize, HookType.AROUND)


def initialize(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND `initialize_dummy_weights`: layers as loud as what they are added to.

    A matrix keeps the size of what goes through it, a norm's weights are about 1, and the decay of
    a recurrent state is that of a trained one.  A layer always takes the same experts: of random
    ones, two are often so close that what kernels round decides, and the answer is another one.
    Each parameter has a seed of its own: SGLang's makes all layers alike.  They are numbers of
    bfloat16 whatever the server computes in, and the same on every rank, so which rank has which
    shard cannot be heard.
    """
    import torch

    original(model, *args, **kwargs)
    for name, weight in model.state_dict().items():
        if not torch.is_floating_point(weight) or torch.finfo(weight.dtype).bits < SMALLEST_BITS:
            continue
        if "scale" in name:
            continue
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        if name.endswith(ROUTER_BIAS):  # 1 apart, more than two sigmoids can be
            weight.copy_(torch.randperm(len(weight), generator=generator, device=weight.device))
            continue
        middle, width = spread(name, tuple(weight.shape))
        drawn = torch.empty_like(weight, dtype=torch.float32)
        drawn.uniform_(middle - width, middle + width, generator=generator)
        weight.copy_(drawn.to(torch.bfloat16))


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Middle and half width of the uniform distribution of a parameter."""
    if "embed_tokens" in name:
        return 0.0, 1.0
    if name.endswith("dt_bias"):
        return DECAY_BIAS, 0.5
    if "norm" in name and len(shape) == 1:
        return 1.0, 0.2
    if len(shape) < 2 or name.endswith("A_log"):
        return 0.0, 0.1
    return 0.0, math.sqrt(3 / shape[-1])
