"""The peer `sglang` is SGLang's own code under its own rules, and gives everything back."""

import pytest
import torch
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from radix.sim.peers import sglang
from radix.sim.peers.sglang_arena import extend_one
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


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 8), (5, 7), (5, 8), (6, 29), (8, 32)])
def test_the_extend_of_one_request_is_sglangs(start, end):
    given = torch.tensor([start]), torch.tensor([end]), torch.tensor([4 * 9 + (start - 1) % 4])
    free = torch.tensor([7, 3, 5, 11, 2, 8, 6, 12])
    ours, theirs = (torch.zeros(end - start, dtype=torch.int64) for _ in range(2))
    extend_one(*given, free, ours, 1, 4)
    alloc_extend_naive(*given, free, theirs, 4, "cpu")
    assert ours.tolist() == theirs.tolist()


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


def test_a_cap_thins_the_states_of_one_path(prompts):
    first = prompts.request(prompts.new(40_000), output=300)  # chunks leave five, the turn one
    inside = prompts.request(first.ids[:33_000], prompts.new(10))
    shallow = prompts.request(first.ids[:9_000], prompts.new(10))
    given = setup(120_000, state_tokens=STATE, longest=41_000)
    server = sglang.make(given)
    assert serve(server, first, inside, shallow) == [0, 32_768, 8_192]
    server = sglang.make_capped(given)
    assert serve(server, first) == [0]
    assert server.counters()["states"] == 3
    assert serve(server, inside, shallow) == [32_768, 0], "the shallowest went"
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
