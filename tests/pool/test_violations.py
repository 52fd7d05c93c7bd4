"""`violations()` sees every kind of damage, and calls with many ids check as calls with few."""

import numpy as np
import pytest

from mempool import Geometry, Pool, Side, Step


def healthy() -> Pool:
    pool = Pool(Geometry(2000, 100, 10, 1))
    grant = pool.alloc(5, 60)
    pool.free(grant.states[1:2], grant.blocks[3:9])
    pool.retire(grant.states[2:3], grant.blocks[:1], Step(1))
    pool.pin(grant.states[3:4], [])
    assert pool.violations() == []
    return pool


@pytest.mark.parametrize(
    ("number", "where", "name", "key", "value"),
    [
        ("P1", "pool", "geometry", None, Geometry(1100, 100, 10, 1)),
        ("P2", "end", "live", None, 5),
        ("P2", "end", "frontier", None, 6),
        ("P2", "end", "_first_hole", None, 3),
        ("P3", "end", "fixed", None, 1),
        ("P3", "end", "fixed_end", None, 5),
        ("P3", "end", "_fixed", 1, 1),
        ("P3", "end", "_fixed", 0, -1),
        ("P4", "table", "indices", 5, 1),
        ("P4", "table", "indices", 7, 9),
        ("P4", "table", "indices", 0, 1),
        ("P4", "table", "_ids", 1, 4),
        ("P4", "table", "homes", 5, 1),
        ("P4", "table", "homes", 0, 1),
        ("P6", "pool", "_marks", None, (0, 2000)),
    ],
)
def test_damage_is_named_by_its_invariant(number, where, name, key, value):
    pool = healthy()
    parts = {"pool": pool, "end": pool.end_of(Side.STATE), "table": pool.table_of(Side.STATE)}
    if key is None:
        assert getattr(parts[where], name) != value
        setattr(parts[where], name, value)
    else:
        assert getattr(parts[where], name)[key] != value
        getattr(parts[where], name)[key] = value
    found = pool.violations()
    assert any(f"{number}: " in text for text in found), found


@pytest.mark.parametrize("count", [1, 5, 100, 1000])
@pytest.mark.parametrize("bad", ["twice", "foreign", "free", "negative"])
def test_one_bad_id_among_many_is_found(count, bad):
    pool = Pool(Geometry(30_000, 100, 10, 1))
    ids = pool.alloc(0, count + 1).blocks
    pool.free([], ids[-1:])
    good = ids[:-1].tolist()
    extra = {"twice": good[0], "foreign": 2991, "free": count + 1, "negative": -1}[bad]
    why = {"twice": "twice", "free": "free"}.get(bad, "foreign")
    with pytest.raises(ValueError, match=f"id {extra} is .*{why}"):
        pool.free([], [*good, extra])
    assert pool.live_blocks == count
    pool.free([], good)
    assert pool.report().gap_bytes == pool.report().free_bytes
    assert pool.violations() == []


def test_a_far_pin_lets_go_of_a_long_range():
    pool = Pool(Geometry(300_000, 100, 10, 1))
    ids = pool.alloc(0, 20_000).blocks
    pool.pin([], ids[[5, 19_999]])
    pool.free([], ids[6:19_999])
    assert pool.end_of(Side.BLOCK).fixed_end == 20_000
    pool.unpin([], ids[19_999:])
    assert pool.end_of(Side.BLOCK).fixed_end == 6
    assert pool.fundable_states() == (300_000 - 100 - 70) // 100
    grant = pool.alloc(pool.fundable_states(), 0)
    assert [len(move.sources) for move in grant.moves] == [1]
    assert pool.violations() == []


def test_holes_far_apart_are_all_found():
    pool = Pool(Geometry(300_000, 100, 10, 1))
    ids = pool.alloc(0, 20_000).blocks
    gone = np.arange(0, 20_000, 700)
    indices = pool.blocks.index_of(ids[gone])
    pool.free([], ids[gone])
    again = pool.alloc(0, len(gone) + 1)
    assert pool.blocks.index_of(again.blocks[:-1]).tolist() == indices.tolist()
    assert pool.violations() == []
