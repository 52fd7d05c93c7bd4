"""What the shipped policy learns, in worlds where the right answer is plain."""

import numpy as np
import pytest

from radix import CacheConfig, ConsumedLru, Costs, ExpectedLoss
from radix.node import nodes_below
from radix.survival import BOUNDS, BUCKETS, Survival, bucket_of
from tests.oracle.world import World


def hits(policy, order, *, states=100, blocks=1000, echo=True):
    """Tokens resumed by each of the requests; `order` names the session of each."""
    world = World(
        block_size=1, grid=1, policy=policy, states=states, blocks=blocks, ghost_tokens=4096
    )
    history = {}
    resumed = []
    for tick, number in enumerate(order):
        prompt = history.get(number, []) + [number * 10_000 + tick * 10 + i for i in range(8)]
        output = [-(10 * tick + i + 1) for i in range(2)]
        resumed.append(world.serve(prompt, None, output, turn_end=True))
        history[number] = prompt + output if echo else prompt
        if len(prompt) > 70:
            del history[number]  # the conversation is over, another begins
    return resumed, world


@pytest.mark.parametrize("age", [0, 1, 5, 1000, 10**9])
def test_every_age_has_a_bucket(age):
    bucket = bucket_of(age)
    assert 0 <= bucket < BUCKETS
    assert BOUNDS[bucket] <= age
    assert bucket == BUCKETS - 1 or age < BOUNDS[bucket + 1]


def observed(survival, row, age, *, times, used):
    """Checkpoints that waited to `age`, then were used or not."""
    for _ in range(times):
        for bucket in range(bucket_of(age)):
            survival.expose(row, bucket, BOUNDS[bucket + 1] - BOUNDS[bucket])
        survival.expose(row, bucket_of(age), age - BOUNDS[bucket_of(age)])
        if used:
            survival.use(row, bucket_of(age))


def test_a_use_that_comes_promises_most_just_before_and_nothing_after():
    survival = Survival()
    row = survival.row("a", 0, 1.0)
    observed(survival, row, 38, times=200, used=True)
    survival.learn()
    promise = [survival.promise(row, bucket_of(age)) for age in (0, 8, 23, 64)]
    assert promise[0] < promise[1] < promise[2]
    assert promise[3] < promise[0]
    assert promise[0] == pytest.approx(1 / 38, rel=0.3), "one use every 38 ticks"


def test_what_is_never_used_sinks_at_every_age():
    survival = Survival()
    used, idle = survival.row("a", 0, 1.0), survival.row("b", 0, 1.0)
    observed(survival, used, 16, times=100, used=True)
    observed(survival, idle, 64, times=100, used=False)
    survival.learn()
    for bucket in range(bucket_of(64)):
        assert survival.promise(idle, bucket) < survival.promise(used, bucket) / 10


def test_a_class_without_data_follows_its_group():
    survival = Survival()
    busy, idle = survival.row("a", 0, 1.0), survival.row("b", 0, 1.0)
    observed(survival, busy, 8, times=300, used=True)
    observed(survival, idle, 64, times=300, used=False)
    like_busy, like_idle = survival.row("a", 1, 1.0), survival.row("b", 1, 1.0)
    survival.learn()
    assert survival.promise(like_busy, 3) > 10 * survival.promise(like_idle, 3)


def test_sessions_that_return_at_once_are_kept_from_those_that_do_not():
    """One session of every second request, thirty that take turns; room for a few."""
    order = [0 if tick % 2 else 1 + (tick // 2) % 30 for tick in range(240)]
    learned, _ = hits(ExpectedLoss(), order, states=0, blocks=500)
    recent, _ = hits(ConsumedLru(), order, states=0, blocks=500)
    fast = [tick for tick in range(120, 240) if order[tick] == 0]
    slow = [tick for tick in range(120, 240) if order[tick] != 0]
    kept = sum(learned[tick] for tick in fast) / sum(recent[tick] for tick in fast)
    assert kept > 0.99
    assert sum(learned[tick] for tick in slow) > sum(recent[tick] for tick in slow)


def test_a_cycle_longer_than_memory_is_kept_in_part():
    """Least recently used evicts each just before its turn; the promise keeps some."""
    order = [tick % 12 for tick in range(12 * 12)]
    learned, _ = hits(ExpectedLoss(), order, states=0, blocks=700)
    recent, _ = hits(ConsumedLru(), order, states=0, blocks=700)
    assert sum(learned[72:]) > 1.2 * sum(recent[72:])


@pytest.mark.parametrize("echo", [True, False])
def test_clients_that_drop_the_answer_keep_their_prompts_end(echo):
    """The end that the line came back through stays, its twin goes."""
    order = [tick % 6 for tick in range(60)]
    _, world = hits(ExpectedLoss(), order, echo=echo)
    fundable = world.port.pool.fundable_states()
    while world.cache.states > 6:
        assert world.cache.evict(fundable + 1, 0)
        fundable = world.port.pool.fundable_states()
    last = [d % 10 if echo else d % 8 for d in world.held_depths()]
    assert last == [0] * 6


def test_recompute_counts_the_quadratic_part():
    flat, steep = Costs(1, 1), Costs(1, 1, pair_flops=0.001)
    assert flat.recompute(1000, 1100) == 100
    assert steep.recompute(1000, 1100) == pytest.approx(100 + 0.001 * 100 * 1050)
    assert steep.recompute(0, 50) + steep.recompute(50, 100) == pytest.approx(
        steep.recompute(0, 100)
    )


def test_a_long_saving_outlives_a_short_one_of_the_same_bytes():
    world = World(block_size=1, grid=1)
    world.serve(range(100, 104))
    world.serve([*range(40), 50], boundaries=(40,))
    world.serve([*range(40), 60], boundaries=(40,))
    before = world.held_depths()
    assert before == [4, 40, 41, 41]
    assert world.cache.evict(world.port.pool.fundable_states() + 1, 0)
    assert world.held_depths() != before
    assert 40 in world.held_depths()


def test_configuration_names_what_does_not_fit():
    with pytest.raises(ValueError, match="grid 6 must be a multiple of block_size 4, try 8"):
        CacheConfig(block_size=4, grid=6)
    with pytest.raises(
        ValueError, match=r"interval 100 must be 0 \(off\) or a multiple of grid 64"
    ):
        CacheConfig(block_size=64, grid=64, interval=100)
    with pytest.raises(ValueError, match="costs must be positive"):
        Costs(state_bytes=0)


def test_tokens_of_another_type_are_refused():
    world = World()
    for tokens in (np.arange(4, dtype=np.int32), np.zeros((2, 2), dtype=np.int64)):
        with pytest.raises(ValueError, match="tokens must be int64 and 1-D"):
            world.cache.match(tokens, None)


def test_a_trait_tells_rows_of_one_class_apart_and_serves_other_classes():
    """Long answers (3) are followed up, short ones (1) are not: so in a class just met, too."""
    survival = Survival()
    for group in "ab":
        followed, ignored = (survival.row(group, 0, 1.0, (trait, 0)) for trait in (3, 1))
        observed(survival, followed, 20, times=100, used=True)
        observed(survival, ignored, 20, times=100, used=False)
    new = [survival.row("c", 0, 1.0, (trait, 0)) for trait in (3, 1, 0)]
    survival.learn()
    long, short, unknown = (survival.promise(row, 3) for row in new)
    assert long > 3 * short
    assert long > unknown > short


def test_lines_know_their_turns_and_the_last_answer():
    world = World(block_size=1, grid=1)
    world.serve(range(10), output=range(50, 53), turn_end=True)
    world.serve([*range(10), *range(50, 53), 60], output=range(70, 75), turn_end=True)
    ends = {node.end: node.checkpoint for node in nodes_below(world.cache.roots[None])}
    assert [(end, one.turns, one.answer_len) for end, one in sorted(ends.items())] == [
        (10, 0, 0), (13, 0, 3), (14, 1, 0), (19, 1, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [range(50, 62), [*range(11), 99], range(1, 13)])
def test_a_commit_off_the_way_of_its_pin_changes_nothing(tokens):
    world = World(block_size=1, grid=1)
    world.serve(range(12))
    world.serve(range(50, 62))
    pin = world.cache.pin(world.match(range(13)))
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="the pin at 12 is not on the way"):
        world.cache.commit(pin, np.array([*tokens]), None, none, [], finished=True)
    assert world.cache.violations() == []
    world.cache.unpin(pin)
