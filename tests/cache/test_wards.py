"""What a checkpoint is promised once the end below it, that a line would resume from, is gone."""

import numpy as np
import pytest

from mempool import Geometry, Pool
from radix import CacheConfig, Costs, Kind, PrefixCache
from radix.ranking import NOTHING, Ranking
from radix.survival import Survival


def line(start):
    return np.arange(start, start + 20, dtype=np.int64)


def publish(cache, tokens, **kept):
    """Compute `tokens` whole; leave states of these kinds."""
    pin = cache.pin(cache.match(tokens, None))
    grant = cache.acquire(len(kept), len(tokens) - pin.depth)
    offers = [
        (depth, slot, Kind[name])
        for (name, depth), slot in zip(kept.items(), grant.states.tolist(), strict=True)
    ]
    cache.touch(pin)
    cache.commit(pin, tokens, None, grant.blocks, offers, finished=True)


def evict_one(cache, pool):
    assert cache.evict(pool.fundable_states() + 1, 0)


def resumes(cache, tokens):
    return cache.match(np.append(tokens, 7), None).resume_len


@pytest.fixture
def pool():
    return Pool(Geometry(64 * 1024, 1024, 16, 1))


@pytest.fixture
def cache(pool):
    return PrefixCache(pool, CacheConfig(block_size=1, grid=1, costs=Costs(1024, 16)))


def lose_an_end(cache, pool):
    """Two lines with a state at 4; one had an end as well, which is evicted."""
    alive, dead = line(100), line(200)
    publish(cache, alive, INTERVAL=4, TURN_END=20)
    publish(cache, dead, INTERVAL=4)
    pins = [cache.pin(cache.match(tokens, None, limit=4)) for tokens in (alive, dead)]
    evict_one(cache, pool)  # nothing else may go
    for pin in pins:
        cache.unpin(pin)
    assert resumes(cache, alive) == resumes(cache, dead) == 4
    return alive, dead


def test_a_state_that_a_line_will_fall_back_on_outlives_its_equal(cache, pool) -> None:
    """Both are alike by kind, size and uses, and that of the line is older."""
    alive, dead = lose_an_end(cache, pool)
    evict_one(cache, pool)
    assert resumes(cache, alive) == 4
    assert resumes(cache, dead) == 0


def test_a_line_whose_tokens_are_forgotten_is_not_waited_for(cache, pool) -> None:
    alive, _ = lose_an_end(cache, pool)
    (below,) = cache.match(alive, None).node.children.values()
    cache.held.policy.forget(below.lost[-1])
    evict_one(cache, pool)
    assert resumes(cache, alive) == 0, "the older of two equals goes"


def test_of_a_turns_two_ends_one_goes_before_any_line_suffers(cache, pool) -> None:
    one, other = line(100), line(200)
    publish(cache, one, PROMPT_END=16, TURN_END=20)
    publish(cache, other, PROMPT_END=16, TURN_END=20)
    for _ in range(2):
        evict_one(cache, pool)
    assert min(resumes(cache, one), resumes(cache, other)) >= 16


def test_a_score_is_its_own_and_its_wards_promise() -> None:
    survival = Survival()
    ranking = Ranking(survival)
    row = survival.row("state", 0, 1.0)
    first, second, ward = (ranking.add(_Stub(), row, 0) for _ in range(3))
    for place in (first, second):
        ranking.judge(place, 1.0, NOTHING, least=0.0, early=False)
    ranking.withdraw(ward)
    one = ranking.first(1)
    ranking.judge(first, 1.0, ward, least=0.0, early=False)
    other = ranking.first(1)
    assert one is not other
    ranking.remove(ward)
    assert ranking.first(2) is one


class _Stub:
    """A checkpoint as far as the ranking minds."""

    used = 0
    lost = False
