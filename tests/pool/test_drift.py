"""What the pool promises against what it then does, at Kimi K3's sizes."""

import numpy as np
import pytest

from mempool import Geometry, Pool, Side

K3_TP8 = Geometry.of_model(
    20 * 2**30, n_kda=69, n_mla=24, num_heads=96, head_dim=128, tp=8, block_size=64
)


def churn(pool: Pool, seed: int, steps: int):
    """Random demands and frees; yields after every demand (states, blocks, fits, grant)."""
    rng = np.random.default_rng(seed)
    held = {Side.STATE: [], Side.BLOCK: []}
    for _ in range(steps):
        demand = int(rng.integers(0, 6)), int(rng.integers(0, 900))
        fits = pool.fits(*demand)
        grant = pool.alloc(*demand)
        yield demand, fits, grant
        if grant is not None:
            held[Side.STATE] += grant.states.tolist()
            held[Side.BLOCK] += grant.blocks.tolist()
        for side, ids in held.items():
            rng.shuffle(ids)
            cut = int(rng.integers(0, len(ids) // (20 if grant else 4) + 1))
            pool.free(*((ids[:cut], []) if side is Side.STATE else ([], ids[:cut])))
            del ids[:cut]


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


@pytest.mark.parametrize("seed", range(4))
def test_no_byte_is_stranded_at_a_refusal(seed):
    """Live bytes and the smallest unit that did not fit are 99.5 % of the arena."""
    pool = Pool(K3_TP8)
    geometry = pool.geometry
    for _, _, grant in churn(pool, seed, 400):
        if grant is not None:
            continue
        states, blocks = pool.fundable_states(), pool.fundable_blocks()
        probe = pool.alloc(states, 0)
        report = pool.report()
        used = report.total_bytes - report.free_bytes + geometry.state_bytes
        assert used >= 0.995 * report.total_bytes
        pool.free(probe.states, [])
        probe = pool.alloc(0, blocks)
        report = pool.report()
        used = report.total_bytes - report.free_bytes + geometry.block_bytes
        assert used >= 0.995 * report.total_bytes
        pool.free([], probe.blocks)


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
