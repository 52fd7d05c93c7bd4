"""Each lost token's reason, from trees of one namespace built by hand: blocks of 2, grid of 4."""

import numpy as np
import pytest

from mempool import Geometry, Pool
from radix import CacheConfig, Cause, Kind, PrefixCache
from radix.report import Loss, losses

SIZE = 2


def tokens(*values):
    return np.array(values, dtype=np.int64)


PROMPT = tokens(*range(100, 120))


@pytest.fixture
def cache():
    return PrefixCache(Pool(Geometry(4096, 64, 16, SIZE)), CacheConfig(block_size=SIZE, grid=4))


def publish(cache, prompt, *kept, refused=(), kind=Kind.INTERVAL):
    """Compute all of `prompt`; leave states at `kept`, and say which had no memory."""
    match = cache.match(prompt, "a")
    pin = cache.pin(match)
    grant = cache.acquire(len(kept), (len(prompt) - match.resume_len) // SIZE)
    offers = [(depth, slot, kind) for depth, slot in zip(kept, grant.states.tolist(), strict=True)]
    cache.commit(pin, prompt, "a", grant.blocks, offers, finished=True, refused=refused)


def reasons(cache, prompt):
    match = cache.match(prompt, "a")
    told = {reason: count for reason, count in losses(match, SIZE) if count}
    assert match.resume_len + sum(told.values()) == len(prompt)
    return match.resume_len, told


def test_a_refused_state_is_told_from_one_never_wanted(cache) -> None:
    publish(cache, PROMPT, 4, refused=[12])
    longer = tokens(*PROMPT, 7, 8)
    # Resumed at 4; a state at 12 would have saved 8; from there to 20 none was wanted.
    assert reasons(cache, longer) == (
        4,
        {Loss.REFUSED: 8, Loss.NO_CHECKPOINT: 8, Loss.NEW: 2},
    )


def test_refused_depths_stay_with_their_edge_when_it_splits(cache) -> None:
    publish(cache, PROMPT, 20, refused=[6, 12])
    publish(cache, tokens(*PROMPT[:8], 1, 2, 3, 4), 12)  # parts at 8, inside the edge
    assert reasons(cache, tokens(*PROMPT[:10])) == (
        0,
        {Loss.REFUSED: 6, Loss.NO_CHECKPOINT: 3, Loss.TOO_SHORT: 1},
    )
    assert reasons(cache, tokens(*PROMPT[:18]))[1][Loss.REFUSED] == 12


def test_a_state_kept_later_makes_up_for_the_refusal(cache) -> None:
    publish(cache, PROMPT, 4, refused=[12])
    publish(cache, PROMPT, 12)
    assert reasons(cache, tokens(*PROMPT, 7, 8)) == (12, {Loss.NO_CHECKPOINT: 8, Loss.NEW: 2})


def test_a_depth_that_was_not_computed_is_not_remembered(cache) -> None:
    publish(cache, PROMPT[:10], 4, refused=[12])
    assert Loss.REFUSED not in reasons(cache, PROMPT)[1]


def test_an_evicted_state_is_named_before_a_refused_one(cache) -> None:
    publish(cache, PROMPT, 8, refused=[4, 12])
    assert cache.evict(cache.config.block_size * 30, 0)
    # 8 tokens lie above the evicted state, 4 more above the refused one.
    assert reasons(cache, PROMPT) == (
        0,
        {Loss.EVICTED: 8, Loss.REFUSED: 4, Loss.NO_CHECKPOINT: 7, Loss.TOO_SHORT: 1},
    )


@pytest.mark.parametrize(
    ("states", "blocks", "cause"), [(1, 0, Cause.STATES), (0, 3, Cause.KV), (2, 3, Cause.BOTH)]
)
def test_a_cause_is_what_was_asked_for(states, blocks, cause) -> None:
    assert Cause.of(states, blocks) is cause


def test_what_was_taken_was_evicted_flushed_or_is_held(cache) -> None:
    publish(cache, PROMPT, 8)
    assert cache.evict(60, 0)
    publish(cache, PROMPT, 8, 12)
    cache.flush()
    publish(cache, PROMPT, 4)
    report = cache.report()
    assert report.taken[Kind.INTERVAL] == 4
    assert report.evictions[Kind.INTERVAL, Cause.STATES] == 1
    assert report.evictions[Kind.INTERVAL, Cause.FLUSH] == 2
    assert report.evicted[Kind.INTERVAL] == 1
    assert report.held[Kind.INTERVAL] == report.states == 1
    assert report.evicted_tokens_for == {
        Cause.STATES: 8,
        Cause.KV: 0,
        Cause.BOTH: 0,
        Cause.FLUSH: 12,
    }


def test_an_extra_that_nobody_used_is_no_loss_until_it_is_missed(cache) -> None:
    """It stood in spare memory, which is no shorter for its going; who comes for it proves it."""
    publish(cache, PROMPT, 12, kind=Kind.OPPORTUNISTIC)
    publish(cache, PROMPT, 20, kind=Kind.PROMPT_END)
    assert cache.evict(cache._pool.fundable_states() + 2, 0)
    longer = tokens(*PROMPT, 7, 8)
    assert reasons(cache, longer) == (0, {Loss.EVICTED: 20, Loss.NEW: 2})
    parted = tokens(*PROMPT[:14], 7, 8)
    assert reasons(cache, parted)[1] == {Loss.NO_CHECKPOINT: 14, Loss.DIVERGED: 2}
    cache.record(cache.match(parted, "a"))
    assert reasons(cache, parted)[1][Loss.EVICTED] == 12
