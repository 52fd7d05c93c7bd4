"""The peer `sglang` is SGLang's own code under its own rules, and gives everything back."""

import pytest
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from radix.sim.peers import sglang
from tests.sim.sequences import Prompts, serve, setup

STATE = 128  # tokens


@pytest.fixture
def prompts():
    return Prompts()


def test_the_class_is_the_wheels():
    server = sglang.make(setup(60_000, state_tokens=STATE))
    assert type(server.tree) is UnifiedRadixCache
    assert type(server.tree).__module__ == "sglang.srt.mem_cache.unified_radix_cache"
    assert server.tree.tree_components == (ComponentType.FULL, ComponentType.MAMBA)
    assert server.arena.allocator.unified_buffer.total_bytes == 60_000 * 32


def test_the_branching_kits_sequence_is_miss_miss_hit(prompts):
    """`prefix_cache_branching_kit`: a shared prefix is resumed by the third request, not before."""
    server = sglang.make(setup(60_000, state_tokens=STATE))
    shared = prompts.new(257)
    ones = [prompts.request(shared, prompts.new(200)) for _ in range(3)]
    assert serve(server, *ones) == [0, 0, 256]
    assert server.violations() == []


def test_the_branching_point_takes_the_place_of_the_prompts_end(prompts):
    server = sglang.make(setup(60_000, state_tokens=STATE))
    shared = prompts.new(257)
    first, second = (prompts.request(shared, prompts.new(200)) for _ in range(2))
    longer = [prompts.request(one.ids[:457], prompts.new(10)) for one in (first, second)]
    assert serve(server, first, second) == [0, 0]
    assert serve(server, *longer) == [448, 256]


def test_a_prompt_leaves_one_state_a_chunk_and_decode_one_in_256(prompts):
    server = sglang.make(setup(60_000, state_tokens=STATE, longest=12_000))
    first = prompts.request(prompts.new(10_000), output=600)  # ends at 10,599: tracked at 10,496
    assert serve(server, first) == [0]
    inside = prompts.request(first.ids[:9_000], prompts.new(10))
    assert serve(server, inside) == [8_192]
    assert serve(server, prompts.request(first.ids, prompts.new(10))) == [10_496]
    assert server.violations() == []


def test_pressure_cuts_short_and_leaks_nothing(prompts):
    """A prompt whose own states leave no room for its end: SGLang's scheduler would die there."""
    server = sglang.make(setup(200 * STATE, state_tokens=STATE, longest=30_000))
    for _ in range(6):
        serve(server, prompts.request(prompts.new(3_000), output=300))
        assert server.violations() == []
    long = prompts.request(prompts.new(25_500))
    assert server.begin(long) == 0
    assert server.extend(long, 8_192)
    assert server.extend(long, 16_384)
    assert server.extend(long, 24_576)
    assert not server.extend(long, 25_500)
    server.finish(long)
    assert server.counters()["failed_allocations"] == 1
    assert server.violations() == []
    assert serve(server, prompts.request(prompts.new(3_000)))[0] == 0
    assert server.violations() == []
