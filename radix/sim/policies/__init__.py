"""Policies by name. Modules are imported when asked for: `sglang` alone needs torch and SGLang."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from radix.sim.server import Server, Setup

# What stands behind a name: module and a factory `(Setup) -> Server` in it.
TABLE: dict[str, str] = {
    "ours": "radix.sim.policies.ours:make",
    "sglang": "radix.sim.peers.sglang:make",
    "sglang-cap3": "radix.sim.peers.sglang:make_capped",
    "marconi": "radix.sim.peers.marconi:make",
    "vllm": "radix.sim.peers.vllm:make",
    "lru": "radix.sim.peers.lru:make",
    "clairvoyant": "radix.sim.policies.clairvoyant:make",
    "unbounded": "radix.sim.policies.bounds:Unbounded",
    "null": "radix.sim.policies.bounds:Null",
}
# Not among "all": other orders of victims over what `ours` keeps.
ORDERS: dict[str, str] = {
    "gdsf": "radix.sim.policies.orders:make_gdsf",
    "lhd": "radix.sim.policies.orders:make_lhd",
    "consumed-lru": "radix.sim.policies.orders:make_consumed_lru",
}


def check(names: Iterable[str]) -> None:
    """Raise ValueError if no policy has one of the names."""
    for name in names:
        if name not in TABLE | ORDERS:
            known = ", ".join(TABLE | ORDERS)
            raise ValueError(f"--policy {name} is unknown; policies: {known} (or all)")


def make(name: str, setup: Setup) -> Server:
    """Build a policy.

    Raises:
        ValueError: no policy has that name, its imports are missing, or the memory is too small.
    """
    check((name,))
    module, factory = (TABLE | ORDERS)[name].split(":")
    try:
        build = getattr(importlib.import_module(module), factory)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--policy {name} needs the package {error.name}: pip install 'sgl-kimi-k3[serve]'"
        ) from None
    return cast("Callable[[Setup], Server]", build)(setup)
