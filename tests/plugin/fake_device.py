"""A device whose values cannot be read: torch's meta device, and a watch on what could wait for it.

Reading back (`item`, `tolist`, `cpu`, `int`) raises by itself, there are no data.  What torch does
on such a device without complaint, and a GPU only after waiting, is caught here: a selection by a
mask, whose size is a value, and a transfer from memory that is not pinned.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.allocator import unified_sub_pool
from torch.utils._python_dispatch import TorchDispatchMode

from mempool import storage

OURS = ("sgl_kimi_k3", "mempool")


class WaitedError(AssertionError):
    """An operation would have waited for the device."""


def caller() -> str:
    """The package whose code, outside torch, called."""
    frame, names = sys._getframe(1), {"torch", "contextlib", __name__}
    while {(name := frame.f_globals["__name__"]), name.split(".")[0]} & names:
        frame = frame.f_back
    return name.split(".")[0]


class Watch(TorchDispatchMode):
    """Raises `WaitedError` where a device would be waited for; counts our transfers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers = 0
        self.pinned: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in ("nonzero", "masked_select", "unique_dim", "_unique2"):
            self.refuse(name, source)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            for index in args[1]:
                if index is not None and index.dtype == torch.bool:
                    self.refuse(f"{name} by a mask", index)
        if name == "_to_copy" and torch.device(kwargs.get("device") or "cpu").type == "meta":
            self.transfer(source, kwargs)
        if name == "copy_" and source.is_meta and not args[1].is_meta:
            self.transfer(args[1], {"non_blocking": len(args) > 2 and args[2]})
        return func(*args, **kwargs)

    @staticmethod
    def refuse(name: str, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            raise WaitedError(f"{name} waits for the device")

    def transfer(self, source: torch.Tensor, options: dict) -> None:
        """SGLang's own transfers are its own business."""
        if source.is_meta or caller() not in OURS:
            return
        self.transfers += 1
        if source.data_ptr() not in self.pinned or not options.get("non_blocking"):
            raise WaitedError("a transfer from pageable memory waits for the stream")


class CountingMover:
    """A mover that only counts units."""

    copied = zeroed = 0

    def __init__(self, rows: torch.Tensor) -> None:
        assert rows.is_meta

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        assert len(sources) == len(targets)
        type(self).copied += len(sources)

    def zero(self, indices: np.ndarray) -> None:
        type(self).zeroed += len(indices)


class KernelWithoutDriver:
    """SGLang's Triton kernel that writes token ids; nothing compiles here."""

    def __getitem__(self, grid):
        return lambda *_: None


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[tuple[Watch, type[CountingMover]]]:
    """Storage on the meta device counts instead of moving; pinned memory is known by address."""
    mover = type("Mover", (CountingMover,), {})
    watch = Watch()

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        watch.pinned.add(tensor.data_ptr())
        return tensor

    patch.setattr(storage, "_default_mover", lambda _: mover)
    patch.setattr(torch.Tensor, "pin_memory", pin_memory)
    patch.setattr(unified_sub_pool, "alloc_extend_kernel", KernelWithoutDriver())
    yield watch, mover
