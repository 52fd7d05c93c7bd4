"""What `sgl-kimi-k3 plan` says of a CPU server is what its live report says once it runs."""

import argparse

import pytest

from sgl_kimi_k3.plan.command import configure, plan_of

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", ["roomy", "tight", "timed", "spread"])
def test_the_plan_is_what_the_server_reports(name, request):
    server = request.getfixturevalue(name)
    given = server.info()
    parser = argparse.ArgumentParser()
    configure(parser)
    words = [server.model, "--device", "cpu", "--no-simulation"]
    words += ["--max-total-tokens", str(given["max_total_tokens"])]
    words += ["--max-mamba-cache-size", str(given["max_mamba_cache_size"])]
    words += ["--page-size", str(given["page_size"])]
    words += ["--tp", str(given["tp_size"]), "--dcp", str(given["dcp_size"])]
    # `timed` was not started by `serve`: SGLang takes float16 for a float32 checkpoint.
    words += ["--dtype", "float16" if given["dtype"] == "auto" else given["dtype"]]
    plan = plan_of(parser.parse_args(words))

    geometry = plan.geometry
    arena = given["internal_states"][0]["kimi_k3"]["arena"]
    names = ("total_bytes", "state_bytes", "block_bytes", "block_size", "max_states", "max_blocks")
    assert {name: arena[name] for name in (*names, "sink_bytes")} == {
        name: getattr(geometry, name) for name in (*names, "sink_bytes")
    }
    assert server.metrics().sum("kimi_k3:arena_bytes") == given["tp_size"] * geometry.total_bytes
    limit = given["internal_states"][0]["kimi_k3"]["limits"]["tokens"]
    assert limit["asked"] == given["max_total_tokens"] * given["dcp_size"]
    assert limit["effective"] == geometry.max_blocks * geometry.block_size
    if name != "timed":  # the table that `serve` prints before it starts
        longest = plan.fits.longest_request
        assert f"longest single request {longest:,} tokens" in server.read_log()
