"""cases.md G3: every part of a state goes wherever the state goes.

There is no host tier and no transfer between servers (both are refused at start), but states are
copied, moved and zeroed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_kimi_k3.arena import NO_IDS
from tests.plugin.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator


def parts(memory: Memory) -> Iterator[torch.Tensor]:
    """All tensors that SGLang registers for states, by layer and slot, whatever they are called."""
    cache = memory.rows.mamba_pool.mamba_cache
    for field in dataclasses.fields(cache):
        value = getattr(cache, field.name)
        found = value if isinstance(value, list | tuple) else [value]
        yield from (part for part in found if isinstance(part, torch.Tensor))


def held(memory: Memory, slot: int) -> list[torch.Tensor]:
    """Copies of the parts of one state."""
    (index,) = memory.arena.state_indices([slot])
    return [part[:, index].clone() for part in parts(memory)]


def fill(memory: Memory, slot: int, value: int) -> None:
    """Another number in every part."""
    (index,) = memory.arena.state_indices([slot])
    for number, part in enumerate(parts(memory)):
        part[:, index] = 10 * value + number


def test_g3_conv_and_recurrent_parts_are_all_there() -> None:
    """bf16 [3, 2] and fp32 [61], in one layer: 12 and 244 bytes of a state's 256."""
    memory = Memory(states=4)
    sizes = [part[0, 0].numel() * part.element_size() for part in parts(memory)]
    assert sizes == [12, 244]
    assert sum(sizes) == memory.arena.geometry.state_bytes


def test_g3_a_state_is_copied_moved_and_zeroed_whole() -> None:
    memory = Memory(tokens=40, states=4)
    arena = memory.arena
    slots = [int(slot) for slot in arena.alloc(3, 0).states]
    for slot in slots:
        fill(memory, slot, slot)
    arena.copy_states([(slots[1], slots[2])])
    for one, other in zip(held(memory, slots[1]), held(memory, slots[2]), strict=True):
        assert torch.equal(one, other)
        assert bool((one != 0).all())
    before, place = held(memory, slots[2]), arena.state_indices(slots[2:])
    arena.free(np.array(slots[:2]), NO_IDS)
    filled = arena.alloc(0, arena.pool.fundable_blocks())  # all of it: the last state moves down
    assert arena.state_indices(slots[2:]) != place
    for one, other in zip(before, held(memory, slots[2]), strict=True):
        assert torch.equal(one, other)
    memory.kv.fill_(7)
    arena.free(NO_IDS, filled.blocks)
    (fresh,) = (int(slot) for slot in arena.alloc(1, 0).states)
    assert not any(part.any() for part in held(memory, fresh))
