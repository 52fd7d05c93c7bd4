"""No operation of ours waits for a device, over a request's whole life."""

import random

import numpy as np
import pytest
import torch

from tests.plugin.fake_device import WaitedError, fake_device
from tests.plugin.test_life import prompt
from tests.plugin.world import World


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as parts:
        yield parts


def test_the_watch_sees_what_would_wait(device):
    watch, _ = device
    world = World(device="meta")
    ids, where = world.arena.slots.of(3), torch.zeros(4, device="meta")
    with watch:
        for read in (int, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero):
            with pytest.raises((RuntimeError, WaitedError), match=r"meta|waits for the device"):
                read(ids)
        with pytest.raises(WaitedError, match="mask"):
            where[where > 0] = 0
        with pytest.raises(WaitedError, match="pageable"):
            exec(  # as if our own code did it
                "torch.zeros(3).to('meta')", {"torch": torch, "__name__": "sgl_kimi_k3.some"}
            )


def test_what_we_add_is_compiled_before_serving(device):
    """Each kernel once for each kind of unit, into the sink; nothing is allocated."""
    watch, mover = device
    world = World(device="meta")
    before = world.arena.pool.report()
    calls = []

    class Recorded(mover):
        def copy(self, sources, targets):
            calls.append(("copy", self, sources.tolist(), targets.tolist()))

        def zero(self, indices):
            calls.append(("zero", self, indices.tolist()))

    for one in world.arena.storage._movers.values():
        one.__class__ = Recorded
    with watch:
        world.allocator.prewarm_compaction()
    states, blocks = world.arena.storage._movers.values()
    geometry = world.arena.geometry
    assert calls == [
        ("copy", states, [geometry.state_first], [0]),
        ("copy", blocks, [geometry.block_last], [0]),
        ("zero", states, [0]),
        ("zero", blocks, [0]),
    ]
    assert watch.transfers == 2, "the two tables"
    assert world.arena.pool.report() == before


@pytest.mark.usefixtures("device")
def test_a_state_id_is_known_by_its_view():
    world = World(device="meta")
    taken = world.rows.mamba_allocator.alloc(1)
    assert world.arena.slots.read(taken[0].unsqueeze(-1)).tolist() == [1]
    world.rows.mamba_allocator.free(taken[0].unsqueeze(-1))
    with pytest.raises(ValueError, match="id 1 is free"):
        world.rows.mamba_allocator.free(taken)


@pytest.mark.parametrize(("overlap", "page_size"), [(False, 1), (True, 4)])
def test_a_whole_life_never_waits(device, overlap, page_size):
    """Admit, extend, decode, commit, finish, retract, abort, evict, move, flush."""
    watch, mover = device
    world = World(
        tokens=260, states=20, rows=6, chunk=24, overlap=overlap, opportunistic=8,
        kernel_chunk=4, device="meta", page_size=page_size,
    )  # fmt: skip
    rng = random.Random(3)
    commits: list[bool] = []
    commit = world.tree.cache.commit

    def watched(*args, **kwargs):
        done = commit(*args, **kwargs)
        commits.append(bool(done.duplicates))
        return done

    world.tree.cache.commit = watched
    shared = prompt(1, 24)
    with watch:
        for _ in range(200):
            if rng.random() < 0.4 and len(world.waiting) < 8:
                cut = rng.randrange(len(shared) + 1)
                tail = prompt(rng.randrange(3), rng.randrange(1, 20))
                world.request(shared[:cut] + tail, rng.randrange(1, 9))
            live = [*world.waiting, *world.running, *([world.chunked] if world.chunked else [])]
            if live and rng.random() < 0.05:
                world.abort(rng.choice(live))
            if world.running and rng.random() < 0.05:
                world.retract(rng.choice(world.running))
            world.step()
        world.run(*world.waiting, *world.running, *([world.chunked] if world.chunked else []))
        world.allocator.flush_opportunistic()
        world.tree.reset()
        world.rows.clear()
        world.allocator.clear()
    counters = world.arena.pool.report().counters
    assert watch.transfers > 100
    assert world.tree.observer.retracted > 0
    assert any(commits), "no commit met blocks that were there already"
    assert counters.moves > 0
    assert mover.copied > counters.moves, "states were copied as well"
    assert mover.zeroed > 0
    assert np.array_equal(world.arena.pool.states.indices, np.zeros(len(world.arena.states.tensor)))
