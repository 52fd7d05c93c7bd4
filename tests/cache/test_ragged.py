"""States inside a block: blocks of 4, hand-counted. World checks every row and state it passes."""

from __future__ import annotations

import pytest

from radix import ConsumedLru, Kind, SlotId
from tests.oracle.world import World

TURN = list(range(10))  # two whole blocks and half of a third


def world(**kwargs) -> World:
    return World(block_size=4, grid=4, policy=ConsumedLru(), **kwargs)


def test_the_end_of_a_turn_inside_a_block_is_resumed_exactly():
    small = world()
    small.serve(TURN)
    assert small.held_depths() == [10]
    assert small.cache.blocks == 3
    assert small.match([*TURN, 50, 51]).resume_len == 10
    assert small.match(TURN).resume_len == 0, "the last token must be computed"
    # It goes on in a block of its own, whose first two rows are copies.
    assert small.serve([*TURN, 50, 51, 52]) == 10
    assert small.held_depths() == [10, 13]
    assert small.cache.blocks == 3 + 2


def test_two_go_on_from_inside_a_block_without_sharing_one():
    small = world()
    small.serve(TURN)
    left = small.start([*TURN, 50, 51, 52, 53, 54, 55])
    right = small.start([*TURN, 60, 61, 62, 63, 64, 65])
    assert (left.resumed, right.resumed) == (10, 10)
    assert not set(left.lease.blocks) & set(right.lease.blocks)
    for run in (left, right):
        small.advance(run, 13)
    for run in (right, left):
        small.advance(run, 16)
        small.finish(run, turn_end=False)
    small.check()
    assert small.held_depths() == [10, 16, 16]
    assert small.match([*TURN, 50, 51, 52, 53, 54, 55, 9]).resume_len == 16


def test_a_state_inside_a_block_is_put_above_what_goes_through_it():
    small = world()
    small.serve(range(20))
    small.serve([*TURN, 90, 91, 92, 93, 94, 95])
    assert small.held_depths() == [8, 16, 20]  # the junction, floored to the grid
    assert small.serve([*range(20), 70, 71], boundaries=[10]) == 20
    small.serve([*TURN, 80], boundaries=[9, 10])
    assert small.held_depths() == [8, 9, 10, 11, 16, 20, 22]
    for end in (20, 22):
        assert small.match([*range(20), 70, 71, 72][: end + 1]).resume_len == end
    assert small.match([*TURN, 90, 91]).resume_len == 10
    assert small.match([*range(9), 77]).resume_len == 9
    assert small.match([*range(8), 77, 9]).resume_len == 8


def test_what_a_state_inside_a_block_holds_alone_is_one_block():
    small = world(states=6, blocks=12)
    small.serve(TURN)
    small.serve([*TURN, 50, 51, 52])
    free = small.port.pool.fundable_states()
    held = small.cache.blocks
    assert small.cache.evict(free + 1, 0)  # the turn's end is older than what was made from it
    assert small.held_depths() == [13]
    assert held - small.cache.blocks == 1
    small.check()
    assert small.match([*TURN, 50, 51, 52, 53]).resume_len == 13
    assert small.match([*TURN, 60]).matched_len == 8


def test_a_pin_inside_a_block_keeps_its_rows_when_the_state_is_evicted():
    small = world(states=6, blocks=12)
    small.serve(TURN)
    run = small.start([*TURN, 50, 51, 52])
    while small.cache.states:
        assert small.cache.evict(small.port.pool.fundable_states() + 1, 0)
    assert small.cache.protected_blocks == 3
    small.advance(run, 13)
    small.finish(run, turn_end=False)
    small.check()
    assert small.held_depths() == [13]
    assert small.cache.blocks == 2 + 2
    assert small.cache.protected_blocks == 0


def test_a_ghost_inside_a_block_goes_on():
    small = world(states=6, blocks=12)
    small.serve(TURN)
    while small.cache.states:
        assert small.cache.evict(small.port.pool.fundable_states() + 1, 0)
    assert small.cache.ghost_tokens == 10
    assert small.match([*TURN, 50]).matched_len == 10
    small.serve([*TURN, 50, 51, 52])
    assert small.held_depths() == [13]
    assert small.cache.ghost_tokens == 0


def test_the_second_of_two_equal_requests_gives_its_copies_back():
    small = world()
    first, second = small.start(TURN), small.start(TURN)
    for run in (first, second):
        small.advance(run, 10)
    for run in (first, second):
        small.finish(run, turn_end=False)
    small.check()
    pool = small.port.pool
    assert (
        (pool.live_states, pool.live_blocks) == (1, 3) == (small.cache.states, small.cache.blocks)
    )


@pytest.mark.parametrize(("depth", "tail"), [(8, 7), (10, None)])
def test_a_tail_comes_with_a_state_inside_a_block_and_with_no_other(depth, tail):
    small = world()
    run = small.start(TURN)
    lease = run.lease
    with pytest.raises(ValueError, match=f"a state at {depth} with tail {tail}: in blocks of 4"):
        small.cache.commit(
            lease.pin,
            run.tokens,
            None,
            lease.blocks[:2],
            [(depth, SlotId(int(lease.live)), Kind.TURN_END, tail)],
            finished=False,
        )


def test_a_turn_can_only_end_in_the_last_block():
    small = world()
    run = small.start(TURN)
    small.advance(run, 10)
    small.decode(run, 50)
    small.decode(run, 51)
    with pytest.raises(ValueError, match="a turn's end at 11 is not in the last block of 12"):
        run.lease.finish(run.tokens, 11)
