"""Under overload, strangers wait; with room, and for whoever asked otherwise, nothing changes."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import pytest
from sglang.srt.managers.schedule_policy import CacheAwarePolicy

from sgl_kimi_k3.gate import gate_of
from tests.plugin.world import World

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

PROMPT, NEW = 60, 4


def crowd(world: World, users: int, rounds: int) -> tuple[float, list[Req]]:
    """Users play turn after turn without a pause: share of prompt tokens resumed, all requests."""
    history = {user: [1000 * user + i for i in range(PROMPT)] for user in range(1, users + 1)}
    playing = {user: world.request(history[user], NEW) for user in history}
    done: list[Req] = []
    while playing:
        world.step()
        for user, req in list(playing.items()):
            if req.finished():
                done.append(req)
                del playing[user]
                history[user] += [*req.output_ids, 7000 + user, 8000 + len(done)]
                if len(done) + len(playing) < rounds * users:
                    playing[user] = world.request(history[user], NEW)
    prompts = sum(len(req.origin_input_ids) for req in done)
    return sum(req.num_matched_prefix_tokens for req in done) / prompts, done


def small(**options: int) -> World:
    """Memory for about three of these conversations."""
    return World(tokens=300, states=12, rows=12, chunk=64, overlap=True, **options)


def test_more_conversations_than_fit_do_not_take_each_others_states() -> None:
    in_order, _ = crowd(small(overtake=0), users=9, rounds=12)
    world = small()
    held, done = crowd(world, users=9, rounds=12)
    turnstile = world.tree.gate.turnstile
    assert in_order < 0.2
    assert held > 3 * in_order
    assert turnstile.held_requests > 0
    assert all(len(req.output_ids) == NEW for req in done)
    assert turnstile.most_overtaken <= 16 * 9  # nine wait at most


def test_once_let_in_a_stranger_is_followed_by_as_many_as_before() -> None:
    """Three agents of whom one always runs; strangers need more than is left beside them."""
    limit, turns = 4, 0
    world = World(tokens=420, states=14, rows=8, chunk=64, overtake=limit)
    history = [[1000 * agent + i for i in range(100)] for agent in range(3)]
    playing = [world.request(list(history[agent]), 4 + 2 * agent) for agent in range(3)]
    strangers: list[Req] = []
    passed: list[int] = []
    for _ in range(160):
        world.step()
        for agent, req in enumerate(playing):
            if req.finished():
                turns += 1
                history[agent] = [*req.origin_input_ids, *req.output_ids, 7000 + turns]
                if len(history[agent]) > 150:  # it starts again
                    history[agent] = history[agent][:100]
                playing[agent] = world.request(list(history[agent]), 4 + 2 * agent)
        if turns > 9 and (not strangers or strangers[-1].finished()):
            passed.append(turns)
            tokens = [100_000 * (len(strangers) + 1) + i for i in range(180)]
            strangers.append(world.request(tokens, 4))
    between = [after - before for before, after in pairwise(passed)]
    assert len(between) >= 3
    assert median(between) >= limit, f"each is passed by as many, not only the first: {between}"
    assert world.tree.gate.turnstile.let_in > 0


def test_nobody_is_held_where_memory_suffices() -> None:
    world = World(tokens=3000, states=60, rows=12, chunk=64, overlap=True)
    share, _ = crowd(world, users=9, rounds=6)
    same, _ = crowd(
        World(tokens=3000, states=60, rows=12, chunk=64, overlap=True, overtake=0), 9, 6
    )
    assert share == same > 0.7
    assert world.tree.gate.turnstile.held_requests == 0


def test_strangers_alone_are_admitted_as_ever() -> None:
    """Nobody comes back, so nobody is kept room for."""

    def order(**options: int) -> list[str]:
        world = small(**options)
        requests = [
            world.request([1000 * user + i for i in range(PROMPT)], NEW) for user in range(90)
        ]
        ended: list[str] = []
        while len(ended) < len(requests):
            world.step()
            ended += [r.rid for r in requests if r.finished() and r.rid not in ended]
        return ended

    assert order() == order(overtake=0)


@pytest.mark.parametrize("asked", ["policy", "priorities", "off"])
def test_whoever_asked_for_another_order_gets_it(asked: str) -> None:
    world = small(overtake=0) if asked == "off" else small()
    if asked == "policy":
        world.scheduler.policy.policy = CacheAwarePolicy.HRRN
    world.scheduler.policy.enable_priority_scheduling = asked == "priorities"
    assert gate_of(world.scheduler) is None
    crowd(world, users=6, rounds=4)
    assert world.tree.gate.turnstile.held_requests == 0


def test_the_queue_keeps_its_order_and_newcomers() -> None:
    world = small()
    crowd(world, users=9, rounds=4)
    gate, seen = world.tree.gate, 0
    running = [world.request([1000 * user + i for i in range(PROMPT)], 40) for user in (1, 2)]
    for user in range(20, 29):
        world.request([1000 * user + i for i in range(PROMPT)], NEW)
    while not all(req.finished() for req in running):
        before = list(world.waiting)
        world.step()
        seen += bool(gate.held)
        assert world.waiting == [req for req in before if req in world.waiting]
        assert all(req in world.waiting for req in gate.held)
    assert seen


def test_it_decides_anew_for_another_queue_of_the_same_length_and_end() -> None:
    """One was aborted and another came back in front, between two passes."""
    world = small()
    running = [world.request([1000 * user + i for i in range(PROMPT)], 40) for user in (1, 2)]
    while len(world.running) < len(running):
        world.step()
    first, second, last = (
        world.request([1000 * user + i for i in range(200)], NEW) for user in (20, 21, 22)
    )
    gate = world.tree.gate
    for front in (first, second):
        queue = [front, last]
        gate.hold_back(queue, world.running, None, 0.5)
        assert gate.short
        gate.admitted(queue, queue)
