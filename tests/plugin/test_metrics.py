"""Our series: exact for a scripted load, complete from the start, conserved."""

import functools

import prometheus_client
import pytest

from sgl_kimi_k3.metrics import METRIC_NAMES, Metrics, levels, totals
from tests.plugin.test_life import prompt
from tests.plugin.world import World


def read(world: World) -> dict[tuple[str, tuple[str, ...]], float]:
    return dict(totals(world.tree)) | dict(levels(world.tree))


def test_a_scripted_load_counts_exactly() -> None:
    world = World(chunk=8)  # several chunks a prompt: still one request each
    first = world.serve(prompt(1, 20), new=6)
    history = [*first.origin_input_ids, *first.output_ids]
    world.serve(history + prompt(2, 10), new=2)
    world.serve(prompt(3, 5), new=1)
    seen = read(world)
    assert seen["input_tokens", ()] == 20 + 36 + 5
    assert seen["resumed_tokens", ()] == 25
    assert seen["hit_tokens", ("turn_end",)] == 25
    lost = sum(value for (name, _), value in seen.items() if name == "lost_tokens")
    assert lost == 61 - 25
    # Prompt ends and turn ends; a request that ends with its prefill leaves one state only.
    assert seen["checkpoints_taken", ("prompt_end",)] == 2
    assert seen["checkpoints_taken", ("turn_end",)] == 3
    assert seen["pins", ()] == 0


def test_a_retracted_request_is_counted_once() -> None:
    world = World()
    req = world.request(prompt(1, 20), new=8)
    for _ in range(5):
        world.step()
    world.retract(req)
    world.run(req)
    seen = read(world)
    assert (seen["input_tokens", ()], seen["retracted_requests", ()]) == (20, 1)


def test_the_parts_of_the_arena_add_up() -> None:
    world = World(tokens=150, states=8)
    for user in range(8):
        world.serve(prompt(user, 30), new=4)
        seen = read(world)
        parts = sum(value for (name, _), value in seen.items() if name == "arena_bytes")
        assert parts == world.arena.geometry.total_bytes
    assert seen["evicted_kv_tokens", ("kv",)] > 0
    assert sum(v for (name, _), v in seen.items() if name == "checkpoints_evicted") > 0


def test_every_series_exists_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        partial = functools.partial(getattr(prometheus_client, kind), registry=registry)
        monkeypatch.setattr(prometheus_client, kind, partial)
    world = World()
    metrics = Metrics(world.tree, {"tp_rank": "0"})
    samples = [s for family in registry.collect() for s in family.samples]
    assert {s.name for s in samples if not s.name.endswith("_created")} == METRIC_NAMES
    world.tree.metrics = metrics
    world.serve(prompt(1, 20))
    value = registry.get_sample_value("kimi_k3:input_tokens_total", {"tp_rank": "0"})
    assert value == 20
