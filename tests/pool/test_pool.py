"""The pool's verbs, one behaviour a test."""

import numpy as np
import pytest

from mempool import Geometry, Grant, Pool, Side, Step

NONE = np.empty(0, dtype=np.int64)


def small(total: int = 100, state: int = 30, block: int = 10, sink: int = 30) -> Pool:
    """A pool with `total` bytes beside the sink."""
    return Pool(Geometry(total + sink, state, block, 1, sink_bytes=sink))


def take(pool: Pool, states: int, blocks: int) -> Grant:
    grant = pool.alloc(states, blocks)
    assert grant is not None
    assert pool.violations() == []
    return grant


def test_both_kinds_come_from_their_own_end():
    pool = small()
    grant = take(pool, 2, 3)
    assert pool.states.index_of(grant.states).tolist() == [1, 2]
    assert pool.blocks.index_of(grant.blocks).tolist() == [12, 11, 10]
    assert (pool.live_states, pool.live_blocks) == (2, 3)
    assert 0 not in grant.states.tolist() + grant.blocks.tolist()


def test_refusal_changes_nothing_but_its_counter():
    pool = small()
    take(pool, 2, 3)
    before = pool.report()
    assert not pool.fits(1, 0)
    assert pool.alloc(1, 0) is None
    after = pool.report()
    assert after.counters.refusals == before.counters.refusals + 1
    assert (after.states, after.blocks, after.gap_bytes) == (
        before.states,
        before.blocks,
        before.gap_bytes,
    )


def test_negative_demand_is_refused():
    with pytest.raises(ValueError, match="-1 states"):
        small().alloc(-1, 0)


def test_hole_nearest_the_own_end_is_reused_first():
    pool = small()
    grant = take(pool, 0, 6)
    pool.free(NONE, grant.blocks[[1, 3]])
    again = take(pool, 0, 3)
    assert pool.blocks.index_of(again.blocks).tolist() == [11, 9, 6]
    assert again.moves == ()


def test_frontier_retreats_when_the_top_is_freed():
    pool = small()
    grant = take(pool, 0, 6)
    pool.free(NONE, grant.blocks[[3, 4]])
    assert pool.report().blocks.frontier == 6
    pool.free(NONE, grant.blocks[[5]])
    assert pool.report().blocks.frontier == 3


def test_alloc_moves_the_topmost_block_for_a_state():
    pool = small()
    grant = take(pool, 1, 7)  # 30 + 70: full
    pool.free(NONE, grant.blocks[[0, 2, 4]])
    more = take(pool, 1, 0)
    (move,) = more.moves
    assert move.side is Side.BLOCK
    assert move.sources.tolist() == [7, 6]  # positions 5 and 6, ascending
    assert move.targets.tolist() == [12, 10]
    assert pool.blocks.index_of(grant.blocks[[1, 3, 5, 6]]).tolist() == [11, 9, 12, 10]


def test_alloc_moves_only_as_many_as_needed():
    pool = small(total=200)
    grant = take(pool, 1, 17)
    pool.free(NONE, grant.blocks[:8])
    more = take(pool, 1, 0)
    assert [len(move.sources) for move in more.moves] == [3]


def test_alloc_moves_a_state_for_blocks():
    pool = small()
    grant = take(pool, 3, 1)
    pool.free(grant.states[:1], NONE)
    more = take(pool, 0, 3)
    (move,) = more.moves
    assert (move.side, move.sources.tolist(), move.targets.tolist()) == (Side.STATE, [3], [1])
    assert pool.states.index_of(grant.states[1:]).tolist() == [2, 1]


def test_alloc_moves_no_more_states_than_needed():
    pool = small(total=240, state=30, block=10)
    grant = take(pool, 8, 0)
    pool.free(grant.states[:3], NONE)
    more = take(pool, 0, 4)
    assert [move.sources.tolist() for move in more.moves] == [[7, 8]]
    assert pool.report().states.frontier == 6


@pytest.mark.parametrize(
    ("ids", "why"),
    [([1, 1], "twice"), ([99], "foreign"), ([0], "foreign"), ([-1], "foreign"), ([5], "free")],
)
@pytest.mark.parametrize("verb", ["free", "retire", "pin"])
def test_bad_ids_raise_and_change_nothing(ids, why, verb):
    pool = small()
    take(pool, 1, 4)
    before = pool.report()
    call = getattr(pool, verb)
    step = (Step(1),) if verb == "retire" else ()
    with pytest.raises(ValueError, match=why):
        call([1], ids, *step)
    assert pool.report() == before
    assert pool.violations() == []


def test_double_free_raises_also_after_the_id_was_freed_alone():
    pool = small()
    take(pool, 0, 3)
    pool.free(NONE, [3])
    with pytest.raises(ValueError, match="id 3 is free"):
        pool.free(NONE, [3])
    assert pool.live_blocks == 2


def test_float_ids_are_refused():
    pool = small()
    take(pool, 0, 1)
    with pytest.raises(ValueError, match="integers"):
        pool.free(NONE, np.array([1.0]))


def test_retired_units_keep_their_bytes_until_their_step_drains():
    pool = small()
    grant = take(pool, 1, 7)
    pool.retire(grant.states, grant.blocks, Step(4))
    assert (pool.live_states, pool.live_blocks) == (0, 0)
    assert (pool.retired_states, pool.retired_blocks) == (1, 7)
    assert not pool.fits(1, 0)
    with pytest.raises(ValueError, match="retired"):
        pool.free(grant.states, NONE)
    pool.drain(Step(3))
    assert not pool.fits(1, 0)
    pool.drain(Step(4))
    assert (pool.retired_states, pool.retired_blocks) == (0, 0)
    assert pool.fits(3, 1)
    assert pool.violations() == []


def test_steps_must_not_go_backwards():
    pool = small()
    grant = take(pool, 2, 0)
    pool.retire(grant.states[:1], NONE, Step(4))
    with pytest.raises(ValueError, match="step 3 after step 4"):
        pool.retire(grant.states[1:], NONE, Step(3))
    assert pool.live_states == 1


def test_a_retired_unit_is_never_moved():
    pool = small()
    grant = take(pool, 3, 1)
    pool.free(grant.states[:1], NONE)
    pool.retire(grant.states[2:], NONE, Step(1))
    assert pool.compact(1000) == ()
    assert pool.fundable_blocks() == 0
    pool.drain(Step(1))
    assert pool.fundable_blocks() == 6


def test_background_compaction_stays_within_its_budget():
    pool = small(total=200)
    grant = take(pool, 1, 16)
    pool.free(NONE, grant.blocks[:6])
    assert pool.compact(9) == ()
    before = pool.report()
    (move,) = pool.compact(25)
    after = pool.report()
    assert (move.sources.tolist(), move.targets.tolist()) == ([8, 7], [22, 21])
    assert after.blocks.frontier == before.blocks.frontier - 2
    assert after.counters.moved_bytes == 20
    assert pool.violations() == []


def test_background_compaction_spares_pinned_ids():
    pool = small()
    grant = take(pool, 0, 4)
    pool.free(NONE, grant.blocks[:1])
    assert pool.compact(1000, pinned_blocks=grant.blocks[3:]) == ()
    assert [len(move.sources) for move in pool.compact(1000)] == [1]


def test_clear_gives_the_whole_arena_back():
    pool = small()
    grant = take(pool, 1, 7)
    pool.retire(grant.states, grant.blocks, Step(1))
    indices = pool.blocks.indices
    pool.clear()
    assert pool.violations() == []
    assert pool.blocks.indices is indices
    assert not indices.any()
    assert take(pool, 3, 1).states.tolist() == [1, 2, 3]


def test_stale_units_are_those_the_other_end_had():
    pool = small()
    assert take(pool, 0, 10).stale_blocks.size == 0
    pool.clear()
    grant = take(pool, 2, 4)
    assert grant.stale_states.tolist() == [1, 2]
    assert grant.stale_blocks.size == 0
    pool.clear()
    grant = take(pool, 1, 7)
    assert grant.stale_states.size == 0
    assert grant.stale_blocks.tolist() == [8, 7, 6]


def test_blocks_are_zeroed_a_state_ahead():
    """Granted one by one, 2.5 to a state: every fourth grant zeroes, as far as the gap reaches."""
    pool = Pool(Geometry(total_bytes=275, state_bytes=25, block_bytes=10, block_size=1))
    pool.free(take(pool, 9, 0).states[1:], NONE)
    seen = [take(pool, 0, 1).stale_blocks.tolist() for _ in range(20)]
    zeroed = [index for indices in seen for index in indices]
    assert zeroed == [*range(24, 4, -1)], "once each; the first two blocks were nobody's"
    assert [len(indices) for indices in seen] == [0, 0] + [4, 0, 0, 0] * 4 + [4, 0]
    assert pool.report().counters.stale_bytes == 200


@pytest.mark.parametrize(("state", "block"), [(25, 1), (1, 25)])
def test_a_unit_that_crosses_by_one_byte_is_stale(state, block):
    pool = small(state=state, block=block, sink=25)
    grant = take(pool, 50 // state, 50 // block)
    assert pool.report().gap_bytes == 0
    if block == 1:
        pool.free(grant.states[-1:], NONE)
        assert take(pool, 0, 1).stale_blocks.tolist() == [*range(74, 49, -1)]
    else:
        pool.free(NONE, grant.blocks[-1:])
        assert take(pool, 1, 0).stale_states.tolist() == [75]
