"""Sizes: exact for Kimi K3, refused with the missing bytes when too small."""

import pytest

from mempool import Geometry

GB = 10**9


def k3(total: int = 80 * GB, **changes) -> Geometry:
    return Geometry.of_model(
        total, **{"n_kda": 69, "n_mla": 24, "num_heads": 96, "head_dim": 128} | changes
    )


@pytest.mark.parametrize(
    ("tp", "fp32", "bf16"),
    [
        (1, 449_372_160, 232_316_928),
        (2, 224_686_080, 116_158_464),
        (4, 112_343_040, 58_079_232),
        (8, 56_171_520, 29_039_616),
        (16, 28_085_760, 14_519_808),
    ],
)
def test_state_bytes_of_kimi_k3(tp, fp32, bf16):
    assert k3(tp=tp).state_bytes == fp32
    assert k3(tp=tp, state_itemsize=2).state_bytes == bf16


@pytest.mark.parametrize(("itemsize", "token_bytes"), [(2, 27_648), (1, 13_824)])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_bytes_of_kimi_k3(itemsize, token_bytes, block_size):
    geometry = k3(kv_itemsize=itemsize, block_size=block_size)
    assert geometry.block_bytes == token_bytes * block_size
    assert geometry.block_size == block_size


def test_tp_leaves_the_latent_rows_replicated():
    assert k3(tp=1).block_bytes == k3(tp=16).block_bytes


def test_dcp_widens_a_block_and_not_its_bytes():
    plain, spread = k3(dcp=1), k3(dcp=8)
    assert spread.block_size == 8 * plain.block_size == 512
    assert (spread.block_bytes, spread.state_bytes) == (plain.block_bytes, plain.state_bytes)


def test_a_token_entry_is_rounded_up_as_sglang_does():
    geometry = k3(n_mla=1, kv_lora_rank=16, rope_dim=8, block_size=1)
    assert geometry.block_bytes == 64  # 48 bytes of rows


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tp": 5}, "--tp-size 5 must divide the 96"),
        ({"tp": 0}, "--tp-size 0"),
        ({"dcp": 0}, "--dcp-size"),
        ({"kv_lora_rank": 3, "rope_dim": 2}, "one MLA row is 10 bytes"),
    ],
)
def test_a_layout_sglang_cannot_run_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        k3(**changes)


@pytest.mark.parametrize("name", ["total_bytes", "state_bytes", "block_bytes", "block_size"])
def test_sizes_must_be_positive(name):
    sizes = {"total_bytes": 100, "state_bytes": 10, "block_bytes": 5, "block_size": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        Geometry(**sizes)


def test_a_negative_sink_is_refused():
    with pytest.raises(ValueError, match="sink_bytes"):
        Geometry(100, 10, 5, 1, sink_bytes=-1)


def test_an_arena_without_room_for_one_unit_names_the_missing_bytes():
    with pytest.raises(ValueError, match="59 bytes lacks 1 bytes to hold one state"):
        Geometry(59, 30, 10, 1)
    assert Geometry(60, 30, 10, 1).max_states == 1


def test_indices_keep_to_int32():
    with pytest.raises(ValueError, match="int32 limit"):
        Geometry(2**31 * 32, 64, 32, 1)
    assert Geometry(2**31 * 32 - 32, 64, 32, 1).block_last == 2**31 - 2


@pytest.mark.parametrize(
    ("state", "block", "sink", "total"),
    [(30, 10, 0, 160), (7, 3, 0, 50), (3, 7, 0, 50), (25, 1, 1, 101), (5, 4, 9, 63)],
)
def test_ends_meet_without_overlap_and_lose_less_than_a_unit_each(state, block, sink, total):
    geometry = Geometry(total, state, block, 1, sink_bytes=sink)
    assert geometry.state_end(geometry.max_states) <= total
    assert geometry.state_end(geometry.max_states) + state > total
    assert geometry.block_start(geometry.max_blocks) >= geometry.sink_bytes
    assert geometry.block_start(geometry.max_blocks) - block < geometry.sink_bytes
    for byte in range(geometry.sink_bytes, total + 1):
        states, blocks = geometry.states_below(byte), geometry.blocks_above(byte)
        assert geometry.state_end(states) <= byte < geometry.state_end(states + 1)
        assert geometry.block_start(blocks) >= byte > geometry.block_start(blocks + 1)


def test_floor_is_the_smallest_arena_that_holds_the_demand():
    for states, blocks in ((1, 1), (2, 5), (0, 9), (3, 0)):
        floor = Geometry(1000, 30, 7, 1).floor_bytes(states=states, blocks=blocks)
        enough = Geometry(floor, 30, 7, 1)
        enough.require(states=states, blocks=blocks)
        with pytest.raises(ValueError, match=r"1 bytes are missing, raise --mem-fraction-static"):
            Geometry(floor - 1, 30, 7, 1).require(states=states, blocks=blocks)


def test_blocks_of_rounds_up():
    geometry = Geometry(1000, 30, 40, 4)
    assert [geometry.blocks_of(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
