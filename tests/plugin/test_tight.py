"""Arenas that barely hold one request: nothing dies, everything is served."""

import itertools

import pytest

from tests.plugin.world import World

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
        )
        requests = [
            world.request([1000 * user + i for i in range(length)], new=4)
            for user in range(1, count + 1)
        ]
        world.run(*requests)
        shape = (count, length, interval, chunk, tokens, states)
        assert [len(req.output_ids) for req in requests] == [4] * count, shape
