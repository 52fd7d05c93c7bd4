"""cases.md H: what one tenant sends shows nowhere in another's requests."""

from __future__ import annotations

import pytest

from tests.cases.published import published
from tests.oracle.world import World as TreeWorld
from tests.plugin.test_life import prompt
from tests.plugin.world import World

PROMPT = [*range(11), 20, 21]


def test_h2_a_planted_prefix_is_the_tenants_own() -> None:
    """A sends P twice, which plants; B sends P: 0, and that first sight is no second one."""
    world = TreeWorld(block_size=1)
    assert [world.serve(PROMPT, "a") for _ in range(2)] == [0, 0]
    assert world.held_depths("a") == [12, 13]
    match = world.match(PROMPT, "b")
    assert (match.matched_len, match.resume_len, match.junction) == (0, 0, None)
    assert world.serve(PROMPT, "b") == 0
    assert world.held_depths("b") == [13], "the prompt's end alone"
    assert world.serve(PROMPT, "b") == 0
    assert world.held_depths("b") == [12, 13], "B's own second sight"
    assert world.serve(PROMPT, "b") == 12


TENANTS = {
    "nobody": {},
    "extra key": {"extra_key": "b"},
    "salt": {"cache_salt": "b"},
    "key like a salt": {"extra_key": "a"},
    "adapter": {"lora_id": "b"},
}


@pytest.mark.parametrize("tenant", TENANTS)
def test_h2_nor_does_it_wait_for_another_tenants_state(tenant: str) -> None:
    """A leader of tenant A is about to leave states on the same tokens: B starts beside it."""
    world = World(tokens=1000, chunk=400, interval=16, kernel_chunk=4)
    shared = prompt(1, 64)
    world.request(shared + prompt(2, 8), new=9, cache_salt="a")
    other = world.request(shared + prompt(3, 8), new=9, **TENANTS[tenant])
    world.step()
    assert other in world.running
    assert other.num_matched_prefix_tokens == 0


@pytest.mark.parametrize("tenant", TENANTS)
def test_h2_every_part_of_a_key_isolates(tenant: str) -> None:
    world = World(interval=4)
    for user in (5, 6):
        world.serve(prompt(1, 20) + prompt(user, 1), new=1, cache_salt="a")
    first = world.serve(prompt(1, 20), new=1, **TENANTS[tenant])
    again = world.serve(prompt(1, 20), new=1, **TENANTS[tenant])
    assert (first.num_matched_prefix_tokens, again.num_matched_prefix_tokens) == (0, 16)
    published(world)
