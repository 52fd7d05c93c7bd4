"""How many requests may run: what was asked for, or what the arena holds; never a static split."""

from types import SimpleNamespace

import pytest
import torch

from sgl_kimi_k3.scheduler import max_running_requests
from tests.plugin.memory import publish_args
from tests.pool.test_sglang_sizes import config


def stock(*_args: object) -> int:
    raise AssertionError("stock's cap was asked for")


def limit(states: int, tokens: int, asked: int | None = None, dcp: int = 1) -> int:
    publish_args(tp_size=8, dcp_size=dcp, max_mamba_cache_size=states, max_running_requests=asked)
    configurator = SimpleNamespace(
        mambaish_config=config("kimi-k3"),
        model_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64),
        kv_cache_dtype=torch.bfloat16,
        attn_dp_size=1,
    )
    return max_running_requests(stock, configurator, tokens)


@pytest.mark.parametrize(("states", "tokens"), [(181, 408_991), (20, 736_088), (380, 4_700)])
def test_the_split_of_the_flags_does_not_matter(states, tokens):
    """20 GiB at TP8: a request of 1,000 tokens takes 56,171,520 + 27,648,000 bytes."""
    assert limit(states, tokens) == 20 * 2**30 // 83_819_520 == 256


def test_ranks_that_share_the_rows_of_a_request_hold_more_of_them():
    """A request's state is whole on every rank, of its rows each of two ranks has half."""
    assert limit(181, 408_991, dcp=2) == 20 * 2**30 // (56_171_520 + 27_648_000 // 2) == 306


def test_what_was_asked_for_stands():
    """Stock would allow 181 // 3."""
    assert limit(181, 408_991, asked=300) == 300
