"""Arenas that barely hold one request: nothing dies, everything is served."""

import itertools

import pytest

from tests.plugin.world import World

# A second turn needs the state it copies, and inside a page a block to copy from, beside its own.
# Largest prompts that an arena of 40 tokens and so many states serves, first turn or second.
LONGEST = [(1, 2, 36), (1, 3, 44), (4, 2, 33), (4, 3, 41)]

SHAPES = [
    (count, length, interval, chunk, tokens, states)
    for count, length, interval, chunk, tokens, states in itertools.product(
        (1, 2, 3), (12, 28), (0, 4, 8), (8, 64), (40, 60), (2, 3, 5)
    )
    if length + 6 <= tokens
]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_that_fits_alone_is_served(overlap: bool) -> None:
    for count, length, interval, chunk, tokens, states in SHAPES:
        world = World(
            tokens=tokens,
            states=states,
            chunk=chunk,
            interval=interval,
            overlap=overlap,
            kernel_chunk=4 if overlap else 0,
            opportunistic=8 if overlap else 4096,
            probation=1,  # every state may be on probation
        )
        requests = [
            world.request([1000 * user + i for i in range(length)], new=4)
            for user in range(1, count + 1)
        ]
        world.run(*requests)
        shape = (count, length, interval, chunk, tokens, states)
        assert [len(req.output_ids) for req in requests] == [4] * count, shape


@pytest.mark.parametrize(("page_size", "states", "longest"), LONGEST)
def test_what_fits_cold_is_served_as_a_second_turn(page_size, states, longest) -> None:
    def world() -> World:
        return World(tokens=40, states=states, overlap=True, page_size=page_size)

    small = world()
    first = small.serve(list(range(1000, 1014)), new=3)
    history = [*first.origin_input_ids, *first.output_ids]
    small.serve(history + list(range(2000, 2000 + longest - len(history))), new=2)

    cold = world()
    refused = cold.request(list(range(1000, 1001 + longest)), new=2)
    for _ in range(20):
        cold.step()
    assert not refused.finished(), "the bound above is not the bound"
