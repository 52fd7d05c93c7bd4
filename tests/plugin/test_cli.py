"""`sgl-kimi-k3`: its commands; `serve`: arguments, refusals, the memory plan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mempool import Geometry
from sgl_kimi_k3 import cli, drafts, resolution, serve
from sgl_kimi_k3.memory_plan import MemoryPlan

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_fill_only_what_was_not_given() -> None:
    argv = serve.server_argv("m", ["--max-total-tokens=99", "--port", "7"], cuda=False)
    assert argv[:4] == ["--model-path", "m", "--radix-cache-backend", "kimi_k3"]
    assert "--max-total-tokens" not in argv
    assert argv[-3:] == ["--max-total-tokens=99", "--port", "7"]
    assert argv[argv.index("--device") + 1] == "cpu"


def test_on_cuda_stock_defaults_stay() -> None:
    assert serve.server_argv("m", [], cuda=True) == [
        "--model-path", "m", "--radix-cache-backend", "kimi_k3",
    ]  # fmt: skip


def test_a_bad_option_ends_with_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "m", "--kimi-k3-grid", "0"]) == 2
    assert capsys.readouterr().err == "sgl-kimi-k3: KIMI_K3_GRID=0: must be at least 1 token\n"


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/models/nowhere"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("sgl-kimi-k3: MODEL /models/nowhere: there is no such folder.")
    assert len(told.splitlines()) == 1


def test_whoever_has_read_enough_sees_no_traceback() -> None:
    script = Path(sys.executable).with_name("sgl-kimi-k3")
    argv = [str(script), "plan", "launch/kimi_k3.config.json"]
    argv += ["--gpu-memory", "143771m", "--tp", "16", "--no-simulation", "--json"]
    command = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    command.stdout.close()  # as `| head` does, and before anything is written
    assert command.stderr.read() == b""
    assert command.wait() == 1


def test_every_command_is_listed_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for command, (_, text) in cli.COMMANDS.items():
        assert command in told
        assert text in told
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        assert f"usage: sgl-kimi-k3 {command}" in capsys.readouterr().out


def plan(total: int) -> MemoryPlan:
    geometry = Geometry(total_bytes=total, state_bytes=200, block_bytes=10, block_size=1)
    return MemoryPlan(200, 10, geometry, asked_requests=None, asked_tokens=None)


def test_concurrency_counts_the_arena_once() -> None:
    # Beside the sink of one state, 1,000 bytes: four requests of 5 tokens take 4 * 250.
    assert plan(1200).concurrent(5) == 4
    assert plan(1199).concurrent(5) == 3
    assert plan(1200).longest_request() == 80


def test_the_plan_reads_as_text() -> None:
    text = "\n".join(plan(1 << 20).lines())
    assert "a state weighs 20 tokens of KV" in text
    assert "1.0 MiB" in text


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """`serve` sets options for the processes it starts; they must not outlive a test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


class View:
    """A resolved configuration that the backend accepts."""

    page_size = None
    mamba_radix_cache_strategy = "auto"
    attention_backend = prefill_attention_backend = decode_attention_backend = None
    chunked_prefill_size = None
    device = "cpu"
    enable_hierarchical_cache = enable_lmcache = enable_mixed_chunk = enable_pdmux = False
    strip_thinking_cache = False
    disaggregation_mode = "null"
    tp_size = pp_size = dcp_size = attn_dp_size = attn_cp_size = 1
    speculative_algorithm = None
    kv_cache_dtype = "auto"
    enable_int8_mamba_checkpoint = False
    mamba_max_states_per_path = -1
    kv_events_config = None


def test_what_works_is_accepted() -> None:
    resolution.refuse_unsupported(View())


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("page_size", 128, "--page-size 128 does not divide KIMI_K3_GRID=64"),
        ("mamba_radix_cache_strategy", "extra_buffer", "no_buffer (got 'extra_buffer')"),
        ("attention_backend", "intel_amx", "--attention-backend intel_amx"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("disaggregation_mode", "decode", "--disaggregation-mode (got 'decode')"),
        ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype nvfp4"),
        ("enable_int8_mamba_checkpoint", True, "--enable-int8-mamba-checkpoint (got True)"),
        ("mamba_max_states_per_path", 3, "--mamba-max-states-per-path (got 3)"),
        ("pp_size", 2, "--pp-size (got 2)"),
        ("attn_cp_size", 2, "--attn-cp-size (got 2)"),
        ("enable_lmcache", True, "--enable-lmcache (got True)"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk (got True)"),
        ("strip_thinking_cache", True, "--strip-thinking-cache (got True)"),
        ("enable_pdmux", True, "--enable-pdmux (got True)"),
        ("kv_events_config", "{}", "--kv-events-config (got '{}')"),
    ],
)
def test_what_cannot_work_is_refused_by_name(field: str, value: object, flag: str) -> None:
    view = View()
    setattr(view, field, value)
    with pytest.raises(ValueError) as caught:
        resolution.refuse_unsupported(view)
    assert flag in str(caught.value)
    assert "Drop" in str(caught.value) or "Use" in str(caught.value)


def drafting(**fields: object) -> View:
    view = View()
    view.speculative_algorithm, view.speculative_ngram_max_bfs_breadth = "ngram", 10
    for field, value in fields.items():
        setattr(view, field, value)
    return view


def test_drafts_are_a_chain_without_overlap() -> None:
    assert drafts.check(View()) == {}
    for breadth in (1, 10):  # the second is SGLang's default
        decided = drafts.check(drafting(speculative_ngram_max_bfs_breadth=breadth))
        assert decided["speculative_ngram_max_bfs_breadth"] == 1
        assert decided["disable_overlap_schedule"]
    assert drafts.check(drafting(device="cuda")) == decided


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE"),
        ("speculative_algorithm", "dflash", "Use --speculative-algorithm NGRAM"),
        ("speculative_ngram_max_bfs_breadth", 4, "--speculative-ngram-max-bfs-breadth 4"),
        ("dcp_size", 2, "--dcp-size 2"),
        ("attn_dp_size", 2, "--attn-dp-size 2"),
    ],
)
def test_drafts_that_cannot_work_are_refused_by_name(field: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        drafts.check(drafting(**{field: value}))
    assert "rop" in str(caught.value)


def test_drafts_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no-such-compiler is missing: apt install"):
        drafts.check(drafting())


def test_dp_attention_needs_a_class_that_splits_states_by_replica(monkeypatch) -> None:
    monkeypatch.setattr(resolution, "is_portable", lambda: False)
    resolution.check_attention_replicas(8, ["KimiK3ForConditionalGeneration"])
    resolution.check_attention_replicas(8, ["KimiK3LinearForCausalLM"])
    resolution.check_attention_replicas(1, ["KimiLinearForCausalLM"])
    with pytest.raises(ValueError, match="--attn-dp-size 8 cannot serve KimiLinearForCausalLM"):
        resolution.check_attention_replicas(8, ["KimiLinearForCausalLM"])
    monkeypatch.setattr(resolution, "is_portable", lambda: True)
    resolution.check_attention_replicas(8, ["KimiLinearForCausalLM"])
