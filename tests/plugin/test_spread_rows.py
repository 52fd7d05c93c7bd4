"""Rows spread over the ranks of a group (DCP): every rank plans alike and keeps its own right.

`World` compares, in every step, the state and each row that the rank holds with the tokens they
stand for: a page copied for a request that goes on inside it must be right on each rank.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kimi_k3.attention import spread
from sgl_kimi_k3.limits import limits
from tests.plugin.memory import publish_args
from tests.plugin.test_life import prompt
from tests.plugin.world import World

# ranks and one rank's page
GROUPS = [(2, 1), (4, 1), (2, 4), (4, 16)]


def ranks(dcp: int, page_size: int, **sizes: object) -> list[World]:
    return [World(dcp=dcp, rank=rank, page_size=page_size, **sizes) for rank in range(dcp)]


def decided(world: World) -> str:
    """Everything the arena gave, moved and took back."""
    return str(world.arena.decisions)


@pytest.mark.parametrize(("dcp", "page_size"), GROUPS)
@pytest.mark.parametrize("length", [20, 21])
def test_a_turn_resumes_at_any_token_on_every_rank(dcp, page_size, length):
    told = set()
    for world in ranks(dcp, page_size, tokens=640):
        first = world.serve(prompt(1, length), new=6)
        history = [*first.origin_input_ids, *first.output_ids]
        second = world.request(history + prompt(2, 10))
        world.step()
        assert second.num_matched_prefix_tokens == len(history) - 1
        world.run(second)
        told.add(decided(world))
    assert len(told) == 1


@pytest.mark.parametrize("dcp", [2, 8])
def test_as_many_more_tokens_fit_as_there_are_ranks(dcp):
    """The states are whole on every rank; of a token's row each has one in so many."""
    one, many = World(tokens=400).allocator, World(tokens=400, dcp=dcp).allocator
    assert many.arena.geometry.total_bytes == one.arena.geometry.total_bytes
    assert many.available_size() == dcp * one.available_size()
    states = [pool.mamba_allocator.schedulable_available_size() for pool in (one, many)]
    assert states[0] == states[1]
    assert many.mamba_slot_full_token_cost() == dcp * one.mamba_slot_full_token_cost()


def test_limits_count_tokens_of_all_ranks():
    """SGLang's flag, `--max-total-tokens`, is for the rows of one."""
    world = World(tokens=400, dcp=2)
    most = 2 * world.arena.geometry.max_blocks
    for rows, asked in ((400, 800), (None, None)):
        publish_args(tp_size=2, dcp_size=2, max_total_tokens=rows)
        assert limits(world.tree)["tokens"] == {"asked": asked, "effective": most}


def test_two_requests_part_inside_a_page_of_all_ranks():
    """With one token of each rank to a page, an odd depth lies inside one."""
    for world in ranks(2, 1, tokens=640, chunk=256):
        first = world.serve(prompt(1, 71), new=1)
        begun = list(first.origin_input_ids)
        match = world.tree.cache.match(np.array([*begun, 0]), (None, None))
        kept = world.tree.cache.path_blocks(match).tolist()
        parted = [world.request(begun + prompt(seed, 5), new=3) for seed in (2, 3)]
        world.step()
        assert [req.num_matched_prefix_tokens for req in parted] == [71, 71]
        rows = [world.rows.blocks(req.kv.req_pool_idx, 0, 36).tolist() for req in parted]
        assert rows[0][:35] == rows[1][:35] == kept[:35]
        assert len({rows[0][35], rows[1][35], kept[35]}) == 3
        world.run(*parted)


ACTIONS = st.tuples(
    st.sampled_from(["request", "request", "step", "step", "step", "abort", "retract"]),
    st.integers(0, 1 << 16),
)


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from(GROUPS),
    actions=st.lists(ACTIONS, min_size=10, max_size=60),
    overlap=st.booleans(),
    in_pass=st.booleans(),
)
def test_every_rank_takes_and_copies_the_same(group, actions, overlap, in_pass):
    dcp, page_size = group
    told = set()
    for world in ranks(
        *group,
        tokens=260,
        states=14,
        rows=6,
        chunk=max(24, dcp * page_size),
        overlap=overlap,
        opportunistic=max(8, dcp * page_size),
        kernel_chunk=4 * in_pass,
    ):
        histories = [prompt(1, 24)]
        for action, number in actions:
            play(world, histories, action, random.Random(number))
        world.run(*world.waiting, *world.running, *([world.chunked] if world.chunked else []))
        world.drain()
        assert world.tree.violations() == []
        told.add((decided(world), world.tree.cache.report().resumed_tokens))
    assert len(told) == 1


def play(world: World, histories: list[list[int]], action: str, rng: random.Random) -> None:
    """One thing that a client or SGLang does."""
    if action == "request" and len(world.waiting) < 6:
        base = rng.choice(histories)
        tokens = base[: rng.randrange(len(base) + 1)] + prompt(rng.random(), rng.randrange(1, 20))
        world.request(tokens, rng.randrange(1, 9))
    elif action == "abort":
        live = [*world.waiting, *world.running, *([world.chunked] if world.chunked else [])]
        if live:
            world.abort(rng.choice(live))
    elif action == "retract" and world.running:
        world.retract(rng.choice(world.running))
    else:
        before = list(world.running)
        world.step()
        histories += [[*req.origin_input_ids, *req.output_ids] for req in before if req.finished()]


@pytest.mark.parametrize("dcp", [2, 3])
@pytest.mark.parametrize("lengths", [[1], [7, 2, 12], [6, 6]])
def test_gathered_rows_are_the_whole(dcp, lengths, monkeypatch):
    """Ranks in turn, their group made up: what each held is laid behind the other's."""
    ids = [torch.arange(dcp, dcp + length) + 100 * number for number, length in enumerate(lengths)]
    ids = [one // dcp * dcp + torch.arange(len(one)) % dcp for one in ids]  # pages of one row each
    held = []
    for rank in range(dcp):
        parallel = SimpleNamespace(dcp_size=dcp, dcp_rank=rank, dcp_group=None)
        monkeypatch.setattr(spread, "get_parallel", lambda parallel=parallel: parallel)
        held.append(spread.SpreadRows(ids))
    rows = [one.held.double()[:, None] for one in held]
    for one in held:
        laid = torch.cat([row.view(torch.uint8) for row in rows])
        one._group = SimpleNamespace(all_gather=lambda _mine, dim, laid=laid: laid[:: dim + 1])
        whole = one.gather(rows[0])
        assert [part[:, 0].tolist() for part in whole] == [each.tolist() for each in ids]
