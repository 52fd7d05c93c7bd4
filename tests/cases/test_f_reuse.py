"""cases.md F: what is resumed, and what is said where nothing is; the thread's small numbers."""

from __future__ import annotations

import logging

import pytest

from sgl_kimi_k3.build import _warn_if_inert
from sgl_kimi_k3.config import Options
from tests.cases.published import published
from tests.oracle.world import World as TreeWorld
from tests.plugin.test_life import prompt
from tests.plugin.world import World


def test_f1_the_threads_lengths() -> None:
    """1500 shared and 700 own tokens, steps of 528: 0, 0, then 1056 of them."""
    world = TreeWorld(block_size=48, grid=528, blocks=600, ghost_tokens=10**6)
    shared = range(1500)
    prompts = [[*shared, *range(own, own + 700)] for own in range(10_000, 14_000, 1000)]
    assert [world.serve(one) for one in prompts] == [0, 0, 1056, 1056]


@pytest.mark.parametrize("kernel_chunk", [0, 64])
def test_f3_a_burst_with_a_new_prefix(kernel_chunk: int) -> None:
    """4 at once, 1024 shared and 128 own tokens, interval 256: one computes the shared part.

    The second burst resumes 1024 in all four, and the state there exists once.
    """
    world = World(
        tokens=6000, states=80, rows=4, chunk=8192, interval=256, grid=64, kernel_chunk=kernel_chunk
    )
    shared = prompt(1, 1024)

    def burst(first: int) -> list[int]:
        requests = [world.request(shared + prompt(first + n, 128), new=1) for n in range(4)]
        world.run(*requests)
        return [req.num_matched_prefix_tokens for req in requests]

    assert burst(10) == [0, 1024, 1024, 1024]
    assert burst(20) == [1024] * 4
    assert published(world).count(1024) == 1


def test_f7_an_interval_above_the_context_is_said(caplog) -> None:
    """8192 in a context of 4096: loudly if it was asked for, as a remark if it is the default."""
    with caplog.at_level(logging.INFO, logger="sgl_kimi_k3.build"):
        for options in (Options(interval=8192), Options(), Options(interval=2048)):
            _warn_if_inert(options, 4096)
    assert [(one.levelname, one.args[1:]) for one in caplog.records] == [
        ("WARNING", ("INTERVAL", 8192, 4096)),
        ("INFO", ("INTERVAL", 32768, 4096)),
    ]


def test_f7_a_grid_above_the_context_is_said(caplog) -> None:
    _warn_if_inert(Options(grid=8192, interval=0, opportunistic=0), 4096)
    assert "KIMI_K3_GRID=8192 is not below the context length of 4096 tokens" in caplog.text


def test_f7_a_prompt_sent_again_resumes() -> None:
    """561 tokens, interval 64: 560 // 64 * 64 = 512."""
    world = World(tokens=2000, states=40, chunk=1024, interval=64, grid=64)
    assert world.serve(prompt(1, 561), new=1).num_matched_prefix_tokens == 0
    assert world.serve(prompt(1, 561), new=1).num_matched_prefix_tokens == 512


TURNS = {  # of the 200 + 60 tokens so far, those sent back -> resumed; where it parted
    "reasoning dropped": (203, 200, 203),
    "reasoning echoed": (260, 259, None),
    "text and tool call split": (230, 200, 230),
}


@pytest.mark.parametrize("turn", TURNS)
def test_f8_a_second_turn_resumes_below_where_it_parts(turn: str) -> None:
    """Interval 64: at least floor(203 / 64) * 64 = 192, echoed floor(260 / 64) * 64 = 256.

    Here the ends of prompt and turn have states of their own, 200 and 259.  It is said where the
    prompt parted.
    """
    sent, resumed, parted = TURNS[turn]
    world = World(tokens=1600, states=40, chunk=512, interval=64, grid=64, explain=True)
    first = world.serve(prompt(1, 200), new=60)
    said = [*first.origin_input_ids, *first.output_ids]
    world.serve(said[:sent] + prompt(2, 80), new=1)
    row = world.tree.observer.explanations.rows()[-1]
    assert (row["resumed"], row["diverged_at"]) == (resumed, parted)
    assert row["lost"].get("diverged", 0) == (0 if parted is None else 80)


@pytest.mark.parametrize(("sent", "resumed"), [(203, 192), (230, 192), (260, 256)])
def test_f8_on_the_grid_alone(sent: int, resumed: int) -> None:
    """As the case counts it: the same history computed in one go, so that it has no ends."""
    world = TreeWorld(
        block_size=1, grid=64, interval=64, states=100, blocks=1200, ghost_tokens=9999
    )
    world.serve(range(261))
    turn = [*range(sent), *range(500, 580)]
    match = world.match(turn)
    assert (match.matched_len, match.diverged) == (sent, True)
    assert world.serve(turn) == resumed
