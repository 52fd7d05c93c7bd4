"""The open pins, and what they protect: KV on the way to each, and the state at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radix.values import Pin

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from radix.node import Node


class Pins:
    """Counts what pins protect; every call is O(edges up to what another pin protects) or less.

    A node's `pins` end there, its `holds` are those of them that still protect the checkpoint, its
    `refs` its pins and those of its children that have `refs`: not zero if the node is on the way
    to a pin.
    """

    def __init__(self) -> None:
        self.protected_states = 0
        self.protected_blocks = 0
        self._open: dict[int, Pin] = {}
        self._relaxed: set[int] = set()  # serials of pins that protect KV only
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._open.values())

    def check(self, pin: Pin) -> None:
        """Raise ValueError unless the pin was opened here and not closed."""
        if self._open.get(pin.serial) is not pin:
            raise ValueError(f"pin {pin.serial} at {pin.depth} is not open in this cache")

    def is_relaxed(self, pin: Pin) -> bool:
        """Whether the open pin protects its KV only."""
        return pin.serial in self._relaxed

    def open(self, node: Node, namespace: Hashable, turn: int | None) -> Pin:
        """Protect the path to `node` and the state there; without a `turn` it begins one."""
        checkpoint = node.checkpoint
        node.pins += 1
        node.holds += 1
        self.protected_states += checkpoint is not None and node.holds == 1
        if node.ragged and node.pins == 1:
            self.protected_blocks += _blocks(node)
        for above in node.lineage():
            above.refs += 1
            if above.refs > 1:
                break  # so are those above
            if not above.ragged:
                self.protected_blocks += _blocks(above)
        self._serial += 1
        slot = None if checkpoint is None else checkpoint.slot
        pin = Pin(self._serial, namespace, node.end, slot, node, turn or self._serial)
        self._open[pin.serial] = pin
        return pin

    def relax(self, pin: Pin) -> None:
        """Stop protecting the state. Idempotent."""
        if pin.serial not in self._relaxed:
            self._relaxed.add(pin.serial)
            pin.node.holds -= 1
            self.protected_states -= pin.node.checkpoint is not None and pin.node.holds == 0

    def close(self, pin: Pin) -> None:
        """Stop protecting anything."""
        self.relax(pin)
        self._relaxed.remove(pin.serial)
        del self._open[pin.serial]
        node = pin.node
        node.pins -= 1
        if node.ragged and not node.pins:
            self.protected_blocks -= _blocks(node)
        for above in node.lineage():
            above.refs -= 1
            if above.refs:
                break
            if not above.ragged:
                self.protected_blocks -= _blocks(above)


def _blocks(node: Node) -> int:
    return 0 if node.blocks is None else len(node.blocks)
