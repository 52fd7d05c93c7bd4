"""What broke for others in a unified byte pool, with the numbers of the public threads.

Every test names the thread it comes from. A pool here has a sink of one state beside the bytes that
the thread counts, so `pool_of(1000, ...)` has 1000 usable bytes.
"""

import numpy as np
import pytest
import torch

from mempool import Geometry, Move, Pool, Side, Step
from mempool.storage import Storage


def pool_of(usable: int, state: int, block: int, block_size: int = 1) -> Pool:
    return Pool(Geometry(usable + state, state, block, block_size, sink_bytes=state))


def blocks(pool: Pool, count: int) -> np.ndarray:
    return pool.alloc(0, count).blocks


def states(pool: Pool, count: int) -> np.ndarray:
    return pool.alloc(count, 0).states


def test_state_starved_by_kv_needs_exactly_five_blocks():
    """sglang #34441, #36713."""
    pool = pool_of(1000, 200, 10)
    held = blocks(pool, 85)
    seen = pool.report()
    assert (seen.blocks.live_bytes, seen.gap_bytes, seen.states.live_bytes) == (850, 150, 0)
    assert seen.sink_bytes + seen.slack_bytes == seen.total_bytes - 1000
    assert pool.fundable_states() == 0
    assert pool.alloc(1, 0) is None
    assert not pool.fits_after(1, 0, freed_states=0, freed_blocks=4)
    assert pool.fits_after(1, 0, freed_states=0, freed_blocks=5)
    pool.free([], held[:4])
    assert pool.alloc(1, 0) is None
    pool.free([], held[4:5])
    assert pool.alloc(1, 0) is not None
    assert pool.report().free_bytes == 0


def test_kv_starved_by_states_needs_exactly_one_state():
    """The mirror case of sglang #34441."""
    pool = pool_of(1000, 200, 10)
    held = states(pool, 5)
    assert pool.fundable_blocks() == 0
    assert pool.fits_after(0, 20, freed_states=1, freed_blocks=0)
    assert not pool.fits_after(0, 21, freed_states=1, freed_blocks=0)
    pool.free(held[:1], [])
    assert pool.alloc(0, 20) is not None


def test_the_gap_is_counted_once():
    """sglang #39294: separate views say 6 and 2, the joint answer says 1 and 3."""
    pool = pool_of(100, 30, 10)
    held = blocks(pool, 4)
    assert (pool.fundable_blocks(), pool.fundable_states()) == (6, 2)
    assert pool.fits(1, 3)
    assert not pool.fits(1, 4)
    assert pool.fits_after(1, 4, freed_states=0, freed_blocks=1)
    pool.free([], held[:1])
    assert pool.alloc(1, 4) is not None


def test_an_undersized_pool_is_a_launch_error():
    """sglang #35158: 2 states of 200 and 20 blocks of 10 need 600 bytes beside the sink."""
    with pytest.raises(ValueError, match=r"800 bytes with the sink of 200.*100 bytes are missing"):
        Geometry(700, 200, 10, 1).require(states=2, blocks=20)
    geometry = Geometry(800, 200, 10, 1)
    geometry.require(states=2, blocks=20)
    assert Pool(geometry).alloc(2, 20) is not None


def test_the_sink_is_in_the_admission_bound():
    """vllm #52520: 1023 tokens of 16 a block need 64 blocks beside the state and the sink."""
    short, enough = (Geometry(n * 16, 80, 16, 16, sink_bytes=80) for n in (73, 74))
    assert short.blocks_of(1023) == 64
    assert not Pool(short).fits(1, 64)
    with pytest.raises(ValueError, match="16 bytes are missing"):
        short.require(states=1, blocks=64)
    assert Pool(enough).alloc(1, 64) is not None


@pytest.mark.parametrize(("gap", "admitted"), [(60, False), (69, False), (70, True)])
def test_all_states_of_a_request_are_charged_at_once(gap, admitted):
    """sglang #29678: 3 states of 20 and one block of 10 need 70."""
    pool = pool_of(gap, 20, 10)
    assert pool.fits(3, 1) == admitted
    assert (pool.alloc(3, 1) is not None) == admitted
    if admitted:
        assert pool.report().free_bytes == 0


def test_a_failed_allocation_takes_nothing():
    """sglang #34676, #39787: two states free, three wanted."""
    pool = pool_of(150, 30, 10)
    held = states(pool, 3)
    assert pool.alloc(3, 0) is None
    assert pool.fundable_states() == 2
    pool.free(held, [])
    assert len(states(pool, 3)) == 3


def test_a_table_is_as_long_as_its_ids_are_high():
    """sglang #37560: one-byte blocks, so block ids run far beyond the states'."""
    pool = pool_of(1000, 100, 1)
    for count, take, side in ((10, states, Side.STATE), (1000, blocks, Side.BLOCK)):
        highest = 0
        for _ in range(3):
            ids = take(pool, count)
            highest = max(highest, int(ids.max()))
            pool.free(*((ids, []) if side is Side.STATE else ([], ids)))
        table = pool.table_of(side)
        assert highest == table.max_id == count
        assert len(table.indices) == count + 1


def test_capacity_follows_a_pin_at_once():
    """sglang #39982, #38836: a hole below a pinned state is not the blocks' to take."""
    pool = pool_of(100, 30, 10)
    held = states(pool, 3)
    pool.free(held[:1], [])
    pool.pin(held[2:], [])
    assert pool.fundable_blocks() == 1
    assert pool.alloc(0, 2) is None
    pool.unpin(held[2:], [])
    assert pool.fundable_blocks() == 4
    storage = Storage(torch.zeros(130, dtype=torch.uint8), pool.geometry)
    storage.rows(Side.STATE)[int(pool.states.index_of(held[2]))].fill_(7)
    storage.apply(pool.alloc(0, 4))
    assert bool((storage.rows(Side.STATE)[int(pool.states.index_of(held[2]))] == 7).all())


def test_a_pin_is_counted_and_a_pinned_unit_cannot_be_dropped():
    pool = pool_of(100, 30, 10)
    held = states(pool, 2)
    pool.pin(held[1:], [])
    pool.pin(held[1:], [])
    pool.unpin(held[1:], [])
    for drop in (pool.free, lambda *ids: pool.retire(*ids, Step(1))):
        with pytest.raises(ValueError, match="id 2 is pinned"):
            drop(held, [])
    with pytest.raises(ValueError, match="id 1 is not pinned"):
        pool.unpin(held, [])
    pool.unpin(held[1:], [])
    pool.free(held, [])
    assert pool.report().free_bytes == 100


@pytest.mark.parametrize("block_size", [1, 16, 64, 512])
@pytest.mark.parametrize("dcp", [1, 8])
def test_one_state_is_one_state_for_any_block_size(block_size, dcp):
    """sglang #36890."""
    geometry = Geometry.of_model(
        10**9, n_kda=3, n_mla=1, num_heads=4, head_dim=16, block_size=block_size, dcp=dcp
    )
    pool = Pool(geometry)
    assert len(states(pool, 1)) == pool.live_states == pool.report().states.frontier == 1


@pytest.mark.parametrize("block_size", [1, 4])
def test_padding_goes_to_the_sink_for_any_block_size(block_size):
    """sglang #34613: a negative id must not read the table from its end."""
    pool = pool_of(100, 30, 10, block_size)
    ids = blocks(pool, 10)
    tokens = np.array([7 * block_size, 8 * block_size, -1, 9 * block_size])
    assert pool.blocks.indices[-1] != 0  # what index -1 would read
    assert pool.blocks.index_of(tokens // block_size).tolist() == [6, 5, 0, 4]
    assert len(ids) == 10


def test_the_sink_is_inside_the_budget():
    """sglang #32184: 100 bytes of 10-byte states are 9 usable ones."""
    geometry = Geometry(100, 10, 10, 1)
    assert geometry.max_states == 9
    assert len(states(Pool(geometry), 9)) == 9


def test_double_free_inside_one_call_is_an_error():
    """sglang #40305, #40348."""
    pool = pool_of(100, 30, 10)
    held = blocks(pool, 3)
    with pytest.raises(ValueError, match="id 3 is named twice"):
        pool.free([], [*held, 3])
    assert pool.live_blocks == 3
    pool.free([], held)
    with pytest.raises(ValueError, match="id 1 is free"):
        pool.free([], held)


def test_the_sink_is_never_handed_out():
    """sglang #17404, #36003, TensorRT-LLM #13151."""
    geometry = Geometry(1000, 70, 30, 1)
    for demand in ((geometry.max_states, 0), (0, geometry.max_blocks)):
        grant = Pool(geometry).alloc(*demand)
        assert min([*grant.states, *grant.blocks]) == 1
    assert geometry.state_first * 70 >= geometry.sink_bytes
    assert geometry.block_first * 30 >= geometry.sink_bytes


def test_a_padded_batch_changes_no_live_unit():
    """sglang #17404: three rows padded to four, one request parked."""
    pool = pool_of(300, 30, 10)
    storage = Storage(torch.zeros(330, dtype=torch.uint8), pool.geometry)
    grant = pool.alloc(4, 6)
    storage.rows(Side.STATE)[1:5] = 5
    storage.rows(Side.BLOCK)[27:33] = 6
    running = [*grant.states[:3].tolist(), -1]
    before = storage.rows(Side.STATE).clone()
    storage.rows(Side.STATE)[torch.from_numpy(pool.states.index_of(running))] += 1
    changed = (storage.rows(Side.STATE) != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert bool((storage.rows(Side.BLOCK)[27:33] == 6).all())


def test_a_finished_request_points_at_the_sink():
    """vllm #37728: a dummy step must not touch the next tenant; its rows are padding, id 0."""
    pool = pool_of(100, 30, 10)
    first = states(pool, 1)
    pool.free(first, [])
    assert pool.states.index_of(first).tolist() == [0]
    second = states(pool, 1)
    assert pool.states.index_of(second).tolist() == [1]
    assert pool.states.index_of(np.array([0, -1])).tolist() == [0, 0]
    assert pool.states.homes[0] == 0  # what a device reads


def test_offsets_pass_two_to_the_31():
    """vllm #54004, dynamo #10552: slot 60 of 50,000,000 bytes starts at 3,000,000,000."""
    geometry = Geometry(61 * 50_000_000, 50_000_000, 1_000_000, 1)
    raw = torch.zeros(geometry.total_bytes, dtype=torch.uint8)  # untouched pages cost nothing
    storage = Storage(raw, geometry)
    storage.rows(Side.BLOCK)[3049].fill_(9)
    storage.zero_states(np.array([60]))
    assert not raw[3_049_000_000:].any()
    storage.rows(Side.BLOCK)[51].fill_(3)
    storage.move([Move(Side.BLOCK, np.array([51]), np.array([3000]))])
    assert bool((raw[3_000_000_000:3_001_000_000] == 3).all())
    assert not raw[3_001_000_000:].any()


def test_a_fake_huge_arena_counts_in_int64():
    """Positions times sizes near 2**40, without the bytes."""
    pool = Pool(Geometry(2**40, 449_372_160, 27_648 * 64, 64))
    assert pool.alloc(2400, 0).stale_states.size == 0
    grant = pool.alloc(0, pool.fundable_blocks())
    assert int(pool.blocks.index_of(grant.blocks).min()) * 27_648 * 64 >= 2401 * 449_372_160
    pool.free([], grant.blocks)
    grant = pool.alloc(40, 0)
    assert len(grant.stale_states) == 40
    assert pool.violations() == []


def test_a_thousand_checkpoint_round_trips_are_bit_exact():
    """sglang #20217: in the stored dtype, whatever the bits mean."""
    geometry = Geometry(6 * 640, 640, 64, 1)
    storage = Storage(torch.zeros(geometry.total_bytes, dtype=torch.uint8), geometry)
    generator = torch.Generator().manual_seed(7)
    state = torch.randint(0, 256, (640,), dtype=torch.uint8, generator=generator)
    storage.rows(Side.STATE)[1] = state
    for _ in range(1000):
        storage.copy_states(np.array([1]), np.array([4]))
        storage.zero_states(np.array([1]))
        storage.copy_states(np.array([4]), np.array([1]))
    assert torch.equal(storage.rows(Side.STATE)[1], state)
