"""Our series: exact for scripted loads worked out by hand, complete from the start, conserved.

Without overlap a turn of n prompt tokens and k new ones leaves states at n and at n + k - 1: the
last sampled token was never fed.  The grid is 4 tokens.
"""

import functools
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
from sglang.srt.runtime_context import get_parallel

from radix import Kind, Loss
from sgl_kimi_k3.ages import AgingPool
from sgl_kimi_k3.capture import Capture
from sgl_kimi_k3.config import Options
from sgl_kimi_k3.live import live_report
from sgl_kimi_k3.metrics import GAUGES, METRIC_NAMES, Metrics, levels, totals
from sgl_kimi_k3.observer import PUBLISH_EVERY_S, Observer
from tests.plugin.test_life import prompt
from tests.plugin.world import World

RANK0 = {"tp_rank": "0", "dp_rank": "0"}


def counted(world: World) -> dict[str, float]:
    """Every counter that is not 0, as `name` or `name/label/label`."""
    assert_conserved(world)
    return {"/".join((name, *own)): total for (name, own), total in totals(world.tree) if total}


def assert_conserved(world: World) -> None:
    """What must add up after any load."""
    seen = defaultdict(float)
    for (name, own), value in [*totals(world.tree), *levels(world.tree)]:
        seen[name] += value
        seen[name, own] += value
    assert seen["input_tokens"] == seen["resumed_tokens"] + seen["lost_tokens"]
    assert seen["hit_tokens"] == seen["resumed_tokens"]
    assert seen["resumed_tokens"] <= seen["matched_tokens"] <= seen["input_tokens"]
    assert seen["checkpoints_taken"] - seen["checkpoints_evicted"] == seen["cached_states"]
    assert seen["arena_bytes"] == world.arena.geometry.total_bytes


def history(request) -> list[int]:
    return [*request.origin_input_ids, *request.output_ids]


def test_two_turns_and_a_stranger() -> None:
    world = World(chunk=8)  # several chunks a prompt: still one request each
    first = world.serve(prompt(1, 20), new=6)
    world.serve(history(first) + prompt(2, 10), new=2)  # 36 tokens, 25 of them stored
    world.serve(prompt(3, 5), new=1)
    assert counted(world) == {
        "requests": 3,
        "input_tokens": 20 + 36 + 5,
        "matched_tokens": 25,
        "resumed_tokens": 25,
        "hit_tokens/turn_end": 25,
        "lost_tokens/new": 20 + 11 + 5,  # the stranger's begin like no other
        # A request that ends with its prefill leaves one state only.
        "checkpoints_taken/prompt_end": 2,
        "checkpoints_taken/turn_end": 3,
    }


def test_a_client_that_retries() -> None:
    """The second sight proves the prompt shared and leaves a junction; the third resumes there."""
    world = World()
    for _ in range(3):
        world.serve(prompt(1, 20), new=6)
    assert counted(world) == {
        "requests": 3,
        "input_tokens": 60,
        "matched_tokens": 0 + 20 + 20,
        "resumed_tokens": 16,
        "hit_tokens/junction": 16,
        "lost_tokens/new": 20,
        "lost_tokens/no_checkpoint": 19 + 3,
        "lost_tokens/too_short": 1 + 1,
        "checkpoints_taken/prompt_end": 1,
        "checkpoints_taken/turn_end": 1,
        "checkpoints_taken/junction": 1,
        "checkpoints_refused/prompt_end/present": 2,
        "checkpoints_refused/turn_end/present": 2,
    }


def test_aborts() -> None:
    """Counted when scheduled: not in the queue, once in a prefill and once in a decode."""
    world = World(chunk=8)
    queued = world.request(prompt(3, 20))
    world.abort(queued)
    prefilling = world.request(prompt(1, 20))
    world.step()
    world.abort(prefilling)
    decoding = world.request(prompt(2, 20), new=8)
    for _ in range(5):  # three chunks, two tokens
        world.step()
    world.abort(decoding)
    assert counted(world) == {
        "requests": 2,
        "input_tokens": 40,
        "lost_tokens/new": 20 + 20,
        "checkpoints_taken/prompt_end": 1,
        "checkpoints_taken/turn_end": 1,
        "checkpoints_taken/retract": 1,  # the prefill's first chunk
    }


def test_a_retraction() -> None:
    """What it computes again is no prompt of a client; nor is what it resumes a hit."""
    world = World()
    req = world.request(prompt(1, 20), new=8)
    for _ in range(5):
        world.step()
    world.retract(req)
    world.run(req)
    assert counted(world) == {
        "requests": 1,
        "input_tokens": 20,
        "lost_tokens/new": 20,
        "retracted_requests": 1,
        "checkpoints_taken/prompt_end": 2,  # at 20, and at 25 when it comes back
        "checkpoints_taken/retract": 1,  # at 24
        "checkpoints_taken/turn_end": 1,  # at 27
    }


def test_a_state_for_which_there_was_no_memory() -> None:
    """44 tokens of KV or 5 states: beside 30 tokens and the live state, 8 more do not fit."""
    world = World(tokens=44, states=1)
    world.serve(prompt(1, 30), new=2)
    before = counted(world)
    assert before == {
        "requests": 1,
        "input_tokens": 30,
        "lost_tokens/new": 30,
        "checkpoints_refused/prompt_end/no_memory": 1,
        "checkpoints_taken/turn_end": 1,  # at 31: the live state itself, no more memory
    }
    world.serve([*prompt(1, 30), *prompt(9, 1)], new=1)
    seen = counted(world)
    assert (seen["input_tokens"], seen["matched_tokens"]) == (30 + 31, 30)
    assert (seen["lost_tokens/refused"], seen["lost_tokens/too_short"]) == (30, 1)


def test_a_state_that_there_is_no_memory_to_resume_from() -> None:
    """48 tokens of KV: beside a state and its copy 32 are left, and the prompt is computed anew."""
    world = World(tokens=40, states=2)
    world.serve(prompt(1, 20), new=1)
    before = counted(world)
    world.serve(prompt(1, 20) + prompt(2, 10), new=2)
    seen = counted(world)
    grown = {name: count - before.get(name, 0) for name, count in seen.items()}
    assert (grown["matched_tokens"], seen.get("resumed_tokens", 0)) == (20, 0)
    assert (grown["lost_tokens/refused"], grown["lost_tokens/new"]) == (20, 10)


def test_tokens_whose_logprobs_are_asked_for_are_known_and_computed() -> None:
    world = World(interval=4)
    world.serve(prompt(1, 20), new=1)
    before = counted(world)
    req = world.request(prompt(1, 20) + prompt(2, 10), new=1)
    req.return_logprob, req.logprob_start_len = True, 10
    world.run(req)
    seen = counted(world)
    grown = {name: n - before.get(name, 0) for name, n in seen.items() if "tokens" in name}
    assert grown == {
        "input_tokens": 30,
        "matched_tokens": 20,
        "resumed_tokens": 8,
        "hit_tokens/interval": 8,
        "lost_tokens/no_checkpoint": 2,
        "lost_tokens/too_short": 10,
        "lost_tokens/new": 10,
    }


def test_what_was_evicted_is_said_with_what_needed_the_room() -> None:
    world = World(tokens=150, states=8)
    for user in range(8):
        world.serve(prompt(user, 30), new=4)
    before = counted(world)
    assert before["input_tokens"] == before["lost_tokens/new"]
    held = world.tree.cache.states
    evicted = sum(n for name, n in before.items() if name.startswith("checkpoints_evicted"))
    assert evicted == 16 - held > 0
    world.serve([*prompt(0, 30), *prompt(9, 1)], new=4)
    seen = counted(world)
    assert (seen["lost_tokens/evicted"], seen["lost_tokens/too_short"]) == (30, 1)


def test_a_flush_drops_what_is_held() -> None:
    world = World()
    world.serve(prompt(1, 20), new=6)
    world.tree.reset()
    world.allocator.clear()
    seen = counted(world)
    assert seen["checkpoints_evicted/prompt_end/flush"] == 1
    assert seen["checkpoints_evicted/turn_end/flush"] == 1
    assert seen["evicted_kv_tokens/flush"] == 25


def test_requests_that_wait_for_memory_are_counted_once() -> None:
    world = World(tokens=60, states=3)
    requests = [world.request(prompt(user, 28), new=4) for user in range(6)]
    world.run(*requests)
    seen = counted(world)
    assert (seen["requests"], seen["input_tokens"]) == (6, 6 * 28)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch):
    """Makes a rank's metrics in a registry of its own, as in its own process."""

    def export(world: World, labels: dict[str, str]):
        registry = prometheus_client.CollectorRegistry()
        with monkeypatch.context() as patch:
            for kind in ("Counter", "Gauge", "Histogram"):
                made = functools.partial(getattr(prometheus_client, kind), registry=registry)
                patch.setattr(prometheus_client, kind, made)
            world.tree.observer.metrics = Metrics(world.tree, labels)
        return registry

    return export


def samples(registry: prometheus_client.CollectorRegistry):
    found = [sample for family in registry.collect() for sample in family.samples]
    return [sample for sample in found if not sample.name.endswith("_created")]


def test_every_series_exists_from_the_start(exported) -> None:
    world = World()
    registry = exported(world, RANK0)
    found = samples(registry)
    assert {sample.name for sample in found} == METRIC_NAMES
    assert all(sample.labels["tp_rank"] == "0" for sample in found)
    for name, label, values in (
        ("lost_tokens", "reason", {loss.value for loss in Loss}),
        ("hit_tokens", "kind", {kind.value for kind in Kind}),
    ):
        own = [sample for sample in found if sample.name == f"kimi_k3:{name}_total"]
        assert {sample.labels[label]: sample.value for sample in own} == dict.fromkeys(values, 0)
    policy = {s.labels["number"] for s in found if s.name == "kimi_k3:policy"}
    assert policy == set(world.tree.cache.policy_numbers())


def test_what_is_exported_is_what_was_counted(exported) -> None:
    world = World(tokens=150, states=8)
    registry = exported(world, RANK0)
    for user in (1, 2, 3, 1, 4, 5):
        world.serve(prompt(user, 30), new=4)
    world.tree.idle()
    for (name, own), value in [*totals(world.tree), *levels(world.tree)]:
        full = f"kimi_k3:{name}" + ("" if name in GAUGES else "_total")
        found = [
            s.value
            for s in samples(registry)
            if s.name == full and set(own) == {v for k, v in s.labels.items() if k not in RANK0}
        ]
        assert found == [value], (name, own)


def test_two_ranks_of_each_kind_count_once(exported) -> None:
    """Tensor-parallel ranks keep one tree between them, data-parallel ranks one each.

    sglang #38825: 10 prompts of 100 tokens are 1000, however many ranks count them.
    """

    def load(seed: int) -> World:
        world = World(chunk=100)
        for user in range(5):
            world.serve(prompt(10 * seed + user, 100), new=1)
        return world

    total: dict[str, dict[str, float]] = defaultdict(dict)
    for dp, seed in enumerate((1, 2)):
        for tp in range(2):
            world = load(seed)
            registry = exported(world, {"tp_rank": str(tp), "dp_rank": str(dp)})
            for sample in samples(registry):
                if sample.name == "kimi_k3:input_tokens_total":
                    total[sample.labels["dp_rank"]][sample.labels["tp_rank"]] = sample.value
    # sum(max without (tp_rank) (...)), as every query of ours says
    assert total == {"0": {"0": 500, "1": 500}, "1": {"0": 500, "1": 500}}
    assert sum(max(ranks.values()) for ranks in total.values()) == 1000


def test_publishing_waits_for_its_time_but_not_when_idle() -> None:
    published = []
    observer = Observer(World().arena, Options(), block_size=1, trace=None)
    observer.metrics = SimpleNamespace(publish=lambda: published.append(1))
    observer.idle()
    for count, happens in enumerate((observer.stepped, observer.idle), start=2):
        observer.committed([], [])
        observer.stepped()  # too soon after the last time
        assert len(published) == count - 1
        if happens == observer.stepped:
            observer._publish_at = 0.0
        happens()
        happens()  # nothing new
        assert len(published) == count
    assert PUBLISH_EVERY_S < 1  # what a scraper sees is hardly older than what it could


def aging(clock, *captures: Capture) -> AgingPool:
    """A pool to which the tree has taken these."""
    arena = SimpleNamespace(
        pool=SimpleNamespace(states=SimpleNamespace(indices=[0] * 4)),
        free=lambda *_: None,
        alloc=None,
        fits=None,
        fits_after=None,
    )
    pool = AgingPool(arena, clock=clock)
    pool.kept(captures)
    return pool


def test_ages_are_seconds_since_last_use() -> None:
    now = 100.0
    ends = [Capture(64, slot, Kind.PROMPT_END, None) for slot in (1, 2)]
    pool = aging(lambda: now, *ends)
    now = 104.0
    pool.resumed(1, counted=True)
    now = 150.0
    pool.resumed(1, counted=False)  # a retracted request comes back
    now = 420.0
    pool.free(np.array([1, 2]), np.array([], dtype=np.int64))
    # 4 s at the hit; 270 s and 320 s at the evictions, with bounds at 1, 5, 15, 60, 300, 900
    assert (pool.hit.counts[1], pool.hit.total_s) == (1, 4.0)
    assert (pool.eviction.counts[4:6], pool.eviction.total_s) == ([1, 1], 590.0)


def test_extras_that_nobody_used_do_not_say_that_memory_is_short() -> None:
    """They go as fast as new prompts come, however much memory there is."""
    now = 100.0
    extras = [Capture(64, slot, Kind.OPPORTUNISTIC, None) for slot in (1, 2, 3)]
    pool = aging(lambda: now, *extras)
    now = 102.0
    pool.resumed(2, counted=True)
    now = 110.0
    pool.free(np.array([1, 2]), np.array([], dtype=np.int64))
    assert pool.hit.total_s == 2.0
    assert (sum(pool.eviction.counts), pool.eviction.total_s) == (1, 8.0)
    pool.kept([Capture(64, 1, Kind.TURN_END, None)])  # the id is another state's
    pool.free(np.array([1]), np.array([], dtype=np.int64))
    assert sum(pool.eviction.counts) == 2


def test_ages_of_a_served_load() -> None:
    world = World(tokens=150, states=8)
    for user in range(8):
        first = world.serve(prompt(user, 20), new=2)
        world.serve(history(first) + prompt(9, 5), new=2)
    pool, seen = world.tree.observer.pool, counted(world)
    assert sum(pool.hit.counts) == 8
    evicted = sum(n for name, n in seen.items() if name.startswith("checkpoints_evicted"))
    assert sum(pool.eviction.counts) == evicted > 0


def test_the_live_report_is_the_counters() -> None:
    world = World(tokens=150, states=8, explain=True)
    for user in (1, 2, 3, 1, 4):
        world.serve(prompt(user, 30), new=4)
    with get_parallel().override(tp_rank=0, attn_dp_rank=0, pp_rank=0):
        report, seen = live_report(world.tree), counted(world)
    assert report["rank"] == {"tp": 0, "dp": 0, "pp": 0}
    assert report["tokens"]["input"] == seen["input_tokens"] == 150
    lost = {f"lost_tokens/{reason}": n for reason, n in report["tokens"]["lost"].items() if n}
    assert lost.items() <= seen.items()
    assert sum(report["checkpoints"]["held"].values()) == world.tree.cache.states
    rows = report["requests"]
    assert [row["prompt_tokens"] for row in rows] == [30] * 5
    assert sum(sum(row["lost"].values()) for row in rows) == sum(lost.values())
    assert sum(row["resumed"] for row in rows) == report["tokens"]["resumed"]
