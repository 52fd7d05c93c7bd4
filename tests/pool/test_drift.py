"""What the pool promises against what it then does, at Kimi K3's sizes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempool import Geometry, Pool, Side

K3_TP8 = Geometry.of_model(
    20 * 2**30, n_kda=69, n_mla=24, num_heads=96, head_dim=128, tp=8, block_size=64
)


def churn(pool: Pool, seed: int, steps: int, blocks: int = 900):
    """Random demands and frees; yields after every demand (states, blocks, fits, grant)."""
    rng = np.random.default_rng(seed)
    held = {side: np.empty(0, dtype=np.int64) for side in Side}
    for _ in range(steps):
        demand = int(rng.integers(0, 6)), int(rng.integers(0, blocks))
        fits = pool.fits(*demand)
        grant = pool.alloc(*demand)
        yield demand, fits, grant
        new = (grant.states, grant.blocks) if grant else ((), ())
        for side, more in zip(Side, new, strict=True):
            ids = rng.permutation(np.append(held[side], more).astype(np.int64))
            cut = int(rng.integers(0, len(ids) // (20 if grant else 4) + 1))
            pool.free(*((ids[:cut], []) if side is Side.STATE else ([], ids[:cut])))
            held[side] = ids[cut:]


@pytest.mark.parametrize("seed", range(4))
def test_estimate_is_what_is_taken(seed):
    pool = Pool(K3_TP8)
    refused = 0
    for demand, fits, grant in churn(pool, seed, 400):
        assert (grant is not None) == fits
        if grant is None:
            refused += 1
            continue
        assert (len(grant.states), len(grant.blocks)) == demand
    assert refused > 10
    assert pool.violations() == []


LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([4, 8, 16]),
        "state_itemsize": st.sampled_from([2, 4]),
        "kv_itemsize": st.sampled_from([1, 2]),
        "block_size": st.sampled_from([16, 64]),
    }
)


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS, states=st.integers(250, 500), seed=st.integers(0, 999))
def test_no_byte_is_stranded_at_a_refusal(layout, states, seed):
    """Live bytes and the first unit of the demand that did not fit are 99.5 % of the arena.

    From 250 states up: the sink is one state, and nobody's. No unit is pinned or retired.
    """
    rng = np.random.default_rng(seed)
    k3 = {"n_kda": 69, "n_mla": 24, "num_heads": 96, "head_dim": 128} | layout
    unit = Geometry.of_model(2**40, **k3).state_bytes
    geometry = Geometry.of_model(states * unit + int(rng.integers(unit)), **k3)
    pool, held = Pool(geometry), []
    for _ in range(4):
        while True:
            wanted, blocks = int(rng.integers(6)), int(rng.integers(geometry.max_blocks // 10))
            grant = pool.alloc(wanted, blocks)
            if grant is None:
                break
            held.append(grant)
        taken = min(wanted, pool.fundable_states())
        held.append(pool.alloc(taken, 0))
        lacking = geometry.state_bytes
        if taken == wanted:
            held.append(pool.alloc(0, min(blocks, pool.fundable_blocks())))
            lacking = geometry.block_bytes
        report = pool.report()
        live = report.states.live_bytes + report.blocks.live_bytes
        assert live + lacking >= 0.995 * geometry.total_bytes
        whole = [rng.random() < 0.5 for _ in held]  # of the others, every second unit goes
        gone = [
            (grant.states[:: 2 - all_], grant.blocks[:: 2 - all_])
            for grant, all_ in zip(held, whole, strict=True)
        ]
        pool.free(*(np.concatenate(ids) for ids in zip(*gone, strict=True)))
        held = [
            replace(grant, states=grant.states[1::2], blocks=grant.blocks[1::2])
            for grant, all_ in zip(held, whole, strict=True)
            if not all_
        ]


def test_moves_are_the_fewest_that_make_room():
    """A frontier retreats exactly as far as the other side must reach."""
    pool = Pool(K3_TP8)
    blocks = pool.alloc(0, pool.fundable_blocks()).blocks
    pool.free([], blocks[:2000])
    state, block = K3_TP8.state_bytes, K3_TP8.block_bytes
    room = pool.report().gap_bytes
    for count in range(1, 20):
        grant = pool.alloc(1, 0)
        moved = sum(len(move.sources) for move in grant.moves)
        need = max(state - room, 0)
        assert (moved - 1) * block < need <= moved * block
        room = room + moved * block - state
        assert pool.report().gap_bytes == room, f"after {count} states"


def test_background_compaction_leaves_no_hole_and_costs_no_more_than_the_holes():
    pool = Pool(K3_TP8)
    grant = pool.alloc(60, 8000)
    rng = np.random.default_rng(5)
    pool.free(rng.permutation(grant.states)[:25], rng.permutation(grant.blocks)[:3000])
    holes = pool.report().states.hole_bytes + pool.report().blocks.hole_bytes
    moved = 0
    while moves := pool.compact(4 * K3_TP8.state_bytes):
        step = sum(
            len(m.sources) * (K3_TP8.state_bytes if m.side is Side.STATE else K3_TP8.block_bytes)
            for m in moves
        )
        assert step <= 4 * K3_TP8.state_bytes
        moved += step
    report = pool.report()
    assert report.states.holes == report.blocks.holes == 0
    assert moved <= holes
    assert report.counters.moved_bytes == moved
