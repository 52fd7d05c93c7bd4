"""What `sgl-kimi-k3 plan` says of a CPU server is what the server reports once it runs."""

import argparse
import re

import pytest

from sgl_kimi_k3.plan.command import configure, plan_of

pytestmark = pytest.mark.e2e

ARENA = re.compile(
    r"kimi_k3 arena: (\d+) bytes; a state is (\d+) bytes, a block of (\d+) token\(s\) (\d+) bytes; "
    r"(\d+) states or (\d+) blocks fit"
)


@pytest.mark.parametrize("name", ["roomy", "tight", "timed"])
def test_the_plan_is_what_the_server_reports(name, request):
    server = request.getfixturevalue(name)
    given = server.info()
    parser = argparse.ArgumentParser()
    configure(parser)
    words = [server.model, "--device", "cpu", "--no-simulation"]
    words += ["--max-total-tokens", str(given["max_total_tokens"])]
    words += ["--max-mamba-cache-size", str(given["max_mamba_cache_size"])]
    # `timed` was not started by `serve`: SGLang takes float16 for a float32 checkpoint.
    words += ["--dtype", "float16" if given["dtype"] == "auto" else given["dtype"]]
    plan = plan_of(parser.parse_args(words))

    logged = ARENA.search(server.read_log())
    geometry = plan.geometry
    assert logged
    assert [int(number) for number in logged.groups()] == [
        geometry.total_bytes,
        geometry.state_bytes,
        geometry.block_size,
        geometry.block_bytes,
        geometry.max_states,
        geometry.max_blocks,
    ]
    found = server.metrics()
    assert found.sum("kimi_k3:arena_bytes") == geometry.total_bytes
