"""Windows of drafts for a few small KDA layers, and the states they start from."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LAYERS, TOKENS = 3, 5
HEADS, K_DIM, V_DIM, WIDTH = 2, 16, 24, 4
CHANNELS = HEADS * (2 * K_DIM + V_DIM)


@dataclass(frozen=True)
class Draft:
    """One layer's window: what its steps are fed, [requests, TOKENS, ...] each."""

    layer: Any
    mixed: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    @classmethod
    def random(cls, seed: int, lower_bound: float | None, requests: int) -> Draft:
        torch.manual_seed(seed)
        shape = (requests, TOKENS)
        layer = SimpleNamespace(
            A_log=torch.randn(HEADS), dt_bias=torch.randn(HEADS * K_DIM), lower_bound=lower_bound
        )
        return cls(
            layer,
            torch.randn(*shape, CHANNELS),
            torch.randn(*shape, HEADS, K_DIM),
            torch.randn(*shape, HEADS, V_DIM),
            2 * torch.randn(*shape, HEADS, K_DIM),
            torch.randn(*shape, HEADS),
        )

    def to(self, device: str, dtype: torch.dtype) -> Draft:
        """On a device, activations in a dtype; the gates' weights stay float32."""
        layer = SimpleNamespace(**vars(self.layer))
        layer.A_log, layer.dt_bias = layer.A_log.to(device), layer.dt_bias.to(device)
        names = ("mixed", "k", "v", "a", "b")
        return Draft(layer, *(getattr(self, name).to(device, dtype) for name in names))

    def parts(self) -> dict[str, Tensor]:
        """As a layer hands them over: tokens of all requests laid end to end."""
        names = ("mixed", "k", "v", "a", "b")
        return {name: getattr(self, name).flatten(0, 1) for name in names}

    @staticmethod
    def params(dtype: torch.dtype = torch.float32) -> Any:
        shape = SimpleNamespace(conv=[(WIDTH - 1, CHANNELS)], temporal=(HEADS, V_DIM, K_DIM))
        return SimpleNamespace(shape=shape, dtype=SimpleNamespace(conv=dtype))

    @staticmethod
    def cache(slots: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
        """All layers' states and rows as the arena holds them: a slot's layers end to end."""
        torch.manual_seed(99)
        states = torch.randn(slots, LAYERS, HEADS, V_DIM, K_DIM).to(device)
        rows = torch.randn(slots, LAYERS, WIDTH - 1, CHANNELS).to(device, dtype)
        return SimpleNamespace(temporal=states.transpose(0, 1), conv=[rows.transpose(0, 1)])
