"""On which stream, and in which order, bytes are touched.

SGLang schedules on one stream and runs forwards on another.  The two hazards of that: a live state
moved while a forward in flight still writes it, and bytes zeroed for their next owner before the
last, late step of a finished request has written them.  Both are excluded if everything that
touches the arena or its tables is enqueued on the forward's own stream: then it happens in the
order in which the world below does it, and the world compares every byte a forward reads.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

from mempool import Side
from sgl_kimi_k3.arena import Arena, DeviceTable
from sgl_kimi_k3.pools import forward_stream
from tests.plugin.test_life import prompt
from tests.plugin.world import World

FORWARD = "the forward's stream"


class Recorder:
    """The current stream, and (operation, side, units, stream) in the order of enqueueing."""

    def __init__(self) -> None:
        self.stream: str | None = None
        self.log: list[tuple[str, Side | None, tuple[int, ...], str | None]] = []

    @contextmanager
    def enter(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def note(self, operation, side, units) -> None:
        self.log.append((operation, side, tuple(int(unit) for unit in units), self.stream))

    def wrap_mover(self, side, mover):
        copy, zero = mover.copy, mover.zero

        def noted_copy(sources, targets):
            self.note("read", side, sources)
            self.note("copy", side, targets)
            copy(sources, targets)

        def noted_zero(indices):
            self.note("zero", side, indices)
            zero(indices)

        mover.copy, mover.zero = noted_copy, noted_zero


def recorded(monkeypatch, **sizes) -> tuple[World, Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "stream", recorder.enter)
    world = World(overlap=True, **sizes)
    world.arena.stream = FORWARD
    for side, mover in world.arena.storage._movers.items():
        recorder.wrap_mover(side, mover)
    refresh = DeviceTable.refresh

    def noted_refresh(table, ids):
        recorder.note("table", None, ids)
        refresh(table, ids)

    monkeypatch.setattr(DeviceTable, "refresh", noted_refresh)
    forward = world._forward

    def noted_forward(req, start, end):
        forward(req, start, end)
        slot = world.rows.translate_mamba_indices(req.kv.mamba_pool_idx.view(1))
        with recorder.enter(FORWARD):
            recorder.note("forward", Side.STATE, slot)

    world._forward = noted_forward
    return world, recorder


def load(world: World) -> None:
    """Aborts and retractions in an arena in which units must move and change kind."""
    rng = random.Random(5)
    shared = prompt(1, 24)
    for _ in range(150):
        if rng.random() < 0.4 and len(world.waiting) < 8:
            cut = rng.randrange(len(shared) + 1)
            world.request(shared[:cut] + prompt(rng.randrange(9), rng.randrange(1, 20)), 4)
        live = [*world.waiting, *world.running, *([world.chunked] if world.chunked else [])]
        if live and rng.random() < 0.1:
            world.abort(rng.choice(live))
        world.step()


@pytest.mark.parametrize("page_size", [1, 4])
def test_everything_happens_in_the_order_of_the_forwards(monkeypatch, page_size) -> None:
    world, recorder = recorded(
        monkeypatch, tokens=260, states=12, rows=6, chunk=24, page_size=page_size, opportunistic=8
    )
    load(world)
    assert {stream for *_, stream in recorder.log} == {FORWARD}
    done = {operation for operation, *_ in recorder.log}
    assert done == {"read", "copy", "zero", "table", "forward"}
    assert world.arena.pool.report().counters.moves > 0


def test_a_state_is_copied_behind_the_forward_that_leaves_it(monkeypatch) -> None:
    world, recorder = recorded(monkeypatch)
    req = world.request(prompt(1, 20), new=6)
    world.step()
    slot = int(world.rows.translate_mamba_indices(req.kv.mamba_pool_idx.view(1)))
    touched = [(what, units) for what, side, units, _ in recorder.log if side is Side.STATE]
    forward, read = touched.index(("forward", (slot,))), touched.index(("read", (slot,)))
    assert forward < read
    world.step()  # the next step, launched before that result is known, comes after the copy
    touched = [(what, units) for what, side, units, _ in recorder.log if side is Side.STATE]
    assert touched[read + 2 :].count(("forward", (slot,))) == 1


def test_bytes_that_change_kind_are_zeroed_behind_their_last_writer(monkeypatch) -> None:
    """A finished request's late step still writes its state; then KV takes the bytes."""
    world, recorder = recorded(monkeypatch, tokens=60, states=3)
    world.serve(prompt(1, 8), new=3)
    while world.tree.cache.states:
        assert world.tree.room.make(states=world.arena.pool.fundable_states() + 1, blocks=0)
    last_write = max(n for n, one in enumerate(recorder.log) if one[0] == "forward")
    grant = world.arena.alloc(0, world.arena.pool.fundable_blocks())
    zeroes = [n for n, one in enumerate(recorder.log) if one[:2] == ("zero", Side.BLOCK)]
    assert zeroes
    assert min(zeroes) > last_write
    assert len(grant.stale_blocks) > 0


def test_the_recorder_sees_another_stream(monkeypatch) -> None:
    """Without this, the first test would pass whatever the arena did."""
    monkeypatch.setattr(Arena, "_in_order", lambda _: nullcontext())
    world, recorder = recorded(monkeypatch, tokens=260, states=12)
    load(world)
    assert {stream for *_, stream in recorder.log} == {FORWARD, None}


@pytest.mark.parametrize(("on_gpu", "overlap"), [(True, True), (True, False), (False, True)])
def test_without_overlap_forwards_run_on_the_schedulers_stream(on_gpu: bool, overlap: bool) -> None:
    found = forward_stream(
        on_gpu=on_gpu, disable_overlap_schedule=not overlap, forward_stream=FORWARD, device="any"
    )
    assert found == (FORWARD if on_gpu and overlap else None)
