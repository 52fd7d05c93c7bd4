"""Where a state helps those that wait with the same prefix."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from sgl_kimi_k3.followers import ENOUGH, worth_a_state

GRID = 4


def req(tokens, resumes=0, key=None):
    ids = array("q", tokens)
    return SimpleNamespace(
        origin_input_ids=ids,
        full_untruncated_fill_ids=ids,
        prefix_len=resumes,
        extra_key=key,
        cache_salt=None,
    )


def behind(first, *others):
    return worth_a_state(first, [first, *others], GRID)


def parted(at, length=40, own=1000):
    """A prompt that shares `at` tokens with range(length)."""
    return [*range(at), *range(own, own + length - at)]


def test_nobody_waits_or_nobody_shares():
    assert behind(req(range(40))) is None
    assert behind(req(range(40)), req(range(100, 140))) is None


@pytest.mark.parametrize(
    ("shared", "depth"), [(3, None), (4, 4), (7, 4), (8, 8), (23, 20), (39, 36), (40, 36)]
)
def test_on_the_grid_and_below_the_last_token(shared, depth):
    assert behind(req(range(40)), req(parted(shared))) == depth


@pytest.mark.parametrize(("resumes", "depth"), [(0, 20), (16, 20), (17, None), (20, None)])
def test_it_saves_a_grid_step_past_what_is_resumed(resumes, depth):
    assert behind(req(range(40), resumes), req(parted(20))) == depth


def test_a_shorter_prompt_ends_it():
    assert behind(req(range(40)), req(range(17))) == 16
    assert behind(req(range(40)), req(range(16))) == 12


def test_the_depth_that_saves_most():
    """One at 36 saves 36; three at 16 save 48."""
    near, far = [req(parted(16, own=1000 * n)) for n in (1, 2)], req(parted(36))
    assert behind(req(range(40)), far) == 36
    assert behind(req(range(40)), far, near[0]) == 36
    assert behind(req(range(40)), far, *near) == 16


def test_tenants_share_nothing():
    assert behind(req(range(40), key="a"), req(range(40), key="b")) is None


def test_enough_is_enough():
    """A long queue is not compared to its end."""
    many = [req(parted(16, own=1000 * n)) for n in range(1, ENOUGH + 1)]
    assert behind(req(range(40)), *many, req(range(40))) == 16
    # Nor are those that share a step and no more.
    off = [req([*range(7), 100 * n]) for n in range(1, ENOUGH + 1)]
    assert behind(req(range(40), 3), *off, req(range(40))) is None
