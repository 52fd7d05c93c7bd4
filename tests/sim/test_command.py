"""The command: what it prints and writes, and what it refuses."""

import json

import pytest

from radix.sim.__main__ import main
from radix.sim.policies import TABLE
from tests.golden.replay import TRACE

CAPACITIES = (200_000_000, 300_000_000, 500_000_000, 1_000_000_000)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The golden trace of tests/golden under the policies that need no peer."""
    folder = tmp_path_factory.mktemp("sim")
    sizes = ",".join(str(size) for size in CAPACITIES)
    code = main(
        [str(TRACE), "--capacity", sizes, "--policy", "ours,unbounded,null",
         "--json", str(folder / "r.json"), "--plot", str(folder / "r.png")]
    )  # fmt: skip
    assert code == 0
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "r.json").read_text("utf-8"))


def test_cells_are_complete(result):
    assert result["trace"] == "chat.jsonl"
    assert result["geometry"]["state_bytes"] == 56_171_520
    names = {"policy", "capacity_bytes", "input_tokens", "resumed_tokens", "token_hit_rate",
             "requests", "saved_flops_share", "wall_s", "counters"}  # fmt: skip
    for cell in result["cells"]:
        assert names <= set(cell)
        assert cell["token_hit_rate"] == cell["resumed_tokens"] / cell["input_tokens"]
    assert [cell["policy"] for cell in result["cells"]].count("null") == 1


def test_null_resumes_nothing_and_nobody_more_than_unbounded(result):
    best = {cell["policy"]: cell for cell in result["cells"]}
    assert best["null"]["resumed_tokens"] == 0
    for cell in result["cells"]:
        assert cell["resumed_tokens"] <= best["unbounded"]["resumed_tokens"]


def test_ours_counts_every_token(result):
    for cell in result["cells"]:
        if cell["policy"] == "ours":
            counters = cell["counters"]
            hits = sum(n for name, n in counters.items() if name.startswith("hit_tokens"))
            lost = sum(n for name, n in counters.items() if name.startswith("lost_tokens"))
            assert hits == cell["resumed_tokens"]
            assert hits + lost == cell["input_tokens"]


def test_processes_find_what_one_process_finds(result, tmp_path):
    out = tmp_path / "r.json"
    sizes = ",".join(str(size) for size in CAPACITIES)
    assert main([str(TRACE), "--capacity", sizes, "--jobs", "2", "--json", str(out)]) == 0
    mine = [cell for cell in result["cells"] if cell["policy"] == "ours"]
    theirs = json.loads(out.read_text("utf-8"))["cells"]
    for one, other in zip(mine, theirs, strict=True):
        assert one | {"wall_s": 0} == other | {"wall_s": 0}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "lru,best"], "--policy best is unknown"),
        (["--capacity", "8q"], "--capacity 8q: write bytes as"),
        (["--capacity", "1m"], "lacks"),
        (["--geometry", "gpt"], "--geometry gpt is neither"),
        (["--interval", "often"], "--interval often"),
        (["--interval", "100"], "interval 100 must be 0"),
        (["--jobs", "0"], "--jobs 0"),
        (["--prefill-rate", "0"], "prefill"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json"),
    ],
)
def test_bad_flags_are_named(flags, words, capsys):
    if "lru" not in TABLE:
        flags = [flag.replace("lru,best", "ours,best") for flag in flags]
    assert main([str(TRACE), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")


def test_a_trace_that_is_none(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "cannot read the trace" in capsys.readouterr().err
