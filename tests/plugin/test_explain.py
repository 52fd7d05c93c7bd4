"""Explanations per request: what they say, and that they are bounded and off by default."""

import logging

import numpy as np

from sgl_kimi_k3.explain import REMEMBERED, Explanations
from tests.plugin.test_life import prompt
from tests.plugin.world import World


def explained(world: World) -> list[dict]:
    return [{**row, "time": None} for row in world.tree.observer.explanations.rows()]


def test_off_by_default() -> None:
    assert World().tree.observer.explanations is None


def test_one_prompt_three_times() -> None:
    """Nothing known; known but no state; resumed at the junction the second left."""
    world = World(explain=True)
    for _ in range(3):
        world.serve(prompt(1, 20), new=6)
    told = {"time": None, "prompt_tokens": 20}
    assert explained(world) == [
        {
            **told, "rid": "r1", "matched": 0, "resumed": 0, "lost": {"new": 20},
            "kind": None, "junction": None, "diverged_at": None,
        },
        {
            **told, "rid": "r2", "matched": 20, "resumed": 0,
            "lost": {"no_checkpoint": 19, "too_short": 1},
            "kind": None, "junction": 16, "diverged_at": None,
        },
        {
            **told, "rid": "r3", "matched": 20, "resumed": 16,
            "lost": {"no_checkpoint": 3, "too_short": 1},
            "kind": "junction", "junction": None, "diverged_at": None,
        },
    ]  # fmt: skip


def test_a_client_that_drops_the_reasoning() -> None:
    """Turn 1: 200 tokens and 60 generated; turn 2 parts at 203: the report says where."""
    world = World(tokens=1200, states=20, chunk=512, interval=64, grid=64, explain=True)
    first = world.serve(prompt(1, 200), new=60)
    said = [*first.origin_input_ids, *first.output_ids]
    world.serve(said[:203] + prompt(2, 80))
    (row,) = explained(world)[1:]
    assert (row["matched"], row["diverged_at"]) == (203, 203)
    assert (row["resumed"], row["kind"]) == (200, "prompt_end")
    assert row["lost"] == {"no_checkpoint": 3, "diverged": 80}


def test_a_retracted_request_is_explained_once() -> None:
    world = World(explain=True)
    req = world.request(prompt(1, 20), new=8)
    for _ in range(5):
        world.step()
    world.retract(req)
    world.run(req)
    assert [row["rid"] for row in explained(world)] == ["r1"]


def test_a_line_in_the_log(caplog) -> None:
    world = World(explain=True)
    with caplog.at_level(logging.INFO, logger="sgl_kimi_k3.explain"):
        world.serve(prompt(1, 20))
    (line,) = caplog.messages
    assert line == (
        "kimi_k3 explain: rid=r1 prompt=20 matched=0 resumed=0 kind=- junction=- diverged_at=- "
        "lost: new=20"
    )


def test_the_ring_is_bounded() -> None:
    world = World()
    world.serve(prompt(1, 20))
    match = world.tree.cache.match(np.array(prompt(1, 20)), None)
    ring = Explanations(1)
    for number in range(REMEMBERED + 5):
        ring.add(f"r{number}", match)
    rows = ring.rows()
    assert len(rows) == REMEMBERED
    assert (rows[0]["rid"], rows[-1]["rid"]) == ("r5", f"r{REMEMBERED + 4}")
