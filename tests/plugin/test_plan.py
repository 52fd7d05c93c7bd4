"""`sgl-kimi-k3 plan`: its bytes are SGLang's and the checkpoint's, its counts come out by hand."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.srt.configs.kimi_linear import KimiLinearConfig
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.unified_memory_pool import MLASubPoolSpec
from sglang.srt.runtime_context import get_parallel, get_schedule, reset_context

from mempool import Geometry
from sgl_kimi_k3 import cli, context_parallel, resolution
from sgl_kimi_k3.demo import checkpoint
from sgl_kimi_k3.plan.capacity import Fits, GpuMemory, IntervalCost, Server
from sgl_kimi_k3.plan.command import configure, plan_of, size
from sgl_kimi_k3.plan.model import Layout, Model, Weights
from sgl_kimi_k3.plan.traffic import Profile
from tests.plugin.memory import publish_args
from tests.plugin.test_cli import View

K3 = Path(__file__).parents[2] / "launch/kimi_k3.config.json"
# model.safetensors.index.json of moonshotai/Kimi-K3, its vision tower of 168 tensors included.
K3_INDEX_BYTES = 1_560_860_324_864
DCP_8 = ("--dcp", "8")
SMALL = Profile(prompt=10, shared=4, turn=3, output=2, turns=3)


def planned(*words):
    parser = argparse.ArgumentParser()
    configure(parser)
    return plan_of(parser.parse_args([str(K3), "--no-simulation", *words]))


@pytest.fixture
def runtime():
    publish_args()
    yield
    reset_context()


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (8, 1), (16, 1), (16, 2)])
@pytest.mark.parametrize(("ssm", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_are_those_of_sglangs_own_classes(tp, dp, ssm, itemsize, monkeypatch):
    reset_context()
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", ssm)
    config = KimiLinearConfig(**json.loads(K3.read_text("utf-8"))["text_config"])
    with get_parallel().override(attn_tp_size=tp // dp):
        theirs = config.mamba2_cache_params.mamba_cache_per_req
    row = MLASubPoolSpec(
        name="full",
        layer_num=len(config.full_attention_layer_ids),
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        store_dtype=torch.bfloat16,
        grow_direction="down",
    )
    server = Server(Model.read(str(K3)), Layout(tp, dp), ssm_dtype=ssm)
    assert server.unit_bytes() == (theirs, row.entry_bytes())
    if (tp, dp, itemsize) == (8, 1, 4):
        assert server.unit_bytes() == (56_171_520, 27_648)  # what the reports call 54 MB and 27 KB


def test_weights_of_the_small_checkpoint_are_exact():
    tensors = checkpoint.weights(checkpoint.config())
    found = Weights.of(Model.of(checkpoint.config()))
    assert found.total == sum(tensor.nbytes for tensor in tensors.values())
    whole = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if any(part in name for part in ("norm", "_res_", "_a_proj", ".gate.", "routed_expert_"))
    )
    assert found.whole == whole


def test_weights_of_kimi_k3_leave_room_for_its_vision_tower():
    total = Weights.of(Model.read(str(K3))).total
    assert 0.999 * K3_INDEX_BYTES < total < K3_INDEX_BYTES


def test_weights_of_kimi_linear_are_those_of_transformers():
    from transformers import AutoModelForCausalLM
    from transformers.models.kimi_linear import KimiLinearConfig as Theirs

    linear = {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16,
        "short_conv_kernel_size": 4,
    }  # fmt: skip
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 4, "kv_lora_rank": 24, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 6, "moe_intermediate_size": 40,
        "num_experts_per_token": 2, "num_shared_experts": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    config = Theirs(
        **{k: v for k, v in sizes.items() if "expert" not in k and "first" not in k},
        num_local_experts=6,
        n_shared_experts=2,
        **{f"{kind}_token_id": 0 for kind in ("pad", "bos", "eos")},
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        layer_types=[*["linear_attention"] * 3, "full_attention"],
        linear_attn_config=linear,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = Weights.of(Model.of({**sizes, "linear_attn_config": linear, "dtype": "float32"}))
    theirs = 4 * sum(parameter.numel() for parameter in model.parameters())
    theirs += 4 * sum(buffer.numel() for name, buffer in model.named_buffers() if "bias" in name)
    stored_long = 4 * 3 * (linear["head_dim"] - linear["num_heads"])  # A_log in the checkpoint
    assert ours.total == theirs + stored_long


@pytest.mark.parametrize("total", [60 << 30, 143_771 << 20, 275_040 << 20])
@pytest.mark.usefixtures("runtime")
def test_the_arena_of_a_gpu_is_sglangs_arithmetic(total, monkeypatch):
    """SGLang's own methods, told what a GPU has free before and after loading."""
    publish_args(mem_fraction_static=0.85)
    server = Server(Model.of(json.loads(K3.read_text("utf-8"))["text_config"]), Layout(8))
    weights = 20 << 30
    free = {"after": (total - weights) / 2**30}
    monkeypatch.setattr(
        kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: free["after"]
    )

    class Parallel:
        launch_world_size = 1
        world_group = argparse.Namespace(cpu_group=None)

    monkeypatch.setattr(kv_cache_configurator, "get_parallel", Parallel)
    graphs = argparse.Namespace(prefill=argparse.Namespace(full_prefill_max_req=None))
    plain = argparse.Namespace(
        graph=argparse.Namespace(cuda_graph_config=graphs),
        mamba=argparse.Namespace(enable_linear_replayssm_spec=False),
    )
    monkeypatch.setattr(kv_cache_configurator, "get_exec", lambda: plain)
    state_bytes, _ = server.unit_bytes()
    params = argparse.Namespace(mamba_cache_per_req=state_bytes, layers=list(range(69)))

    class Stub(argparse.Namespace):
        _profile_available_bytes = (
            kv_cache_configurator.KVCacheConfigurator._profile_available_bytes
        )
        _handle_max_mamba_cache = kv_cache_configurator.KVCacheConfigurator._handle_max_mamba_cache

        def fused_entry_bytes(self, _):
            return None

    stub = Stub(
        device="cuda",
        gpu_id=0,
        mambaish_config=argparse.Namespace(mamba2_cache_params=params),
        post_capture_kv_active=False,
        model_config=argparse.Namespace(is_multimodal=False),
        pp_size=1,
        attn_dp_size=1,
        spec_algorithm=argparse.Namespace(is_none=lambda: True),
        hybrid_gdn_config=None,
        hybrid_kda_config=None,
        extra_mamba_cache_bytes_per_req=0,
    )
    budget = stub._profile_available_bytes(total / 2**30)
    theirs = budget - budget % 4096 + get_schedule().max_mamba_cache_size * state_bytes
    ours = GpuMemory.of(total, 0.85, weights, server).arena_bytes(server)
    assert abs(ours - theirs) <= 4096  # floats of GiB against integers


def test_counts_by_hand():
    # A sink of one state; then 10 states of 30 bytes or 30 tokens of 10.
    geometry = Geometry(total_bytes=330, state_bytes=30, block_bytes=10, block_size=1)
    fits = Fits.of(geometry, Layout(), SMALL, interval=0, context=27, asked=1)
    # A conversation ends at 10 + 2 * 5 + 2 = 22 tokens, 4 of them shared.
    assert fits.longest_request == 27
    assert fits.context_requests == 1
    assert fits.requests == 1  # 22 * 10 + 30 = 250
    assert fits.conversations == 1  # beside 70 shared: 18 * 10 + 30 = 210; two are 420
    assert fits.conversations_all == 0  # six states and 180 beside 70: 430
    assert fits.checkpoints == 2  # 300 - 220 = 80


def test_replicas_of_attention_count_each_their_own_arena():
    geometry = Geometry(total_bytes=330, state_bytes=30, block_bytes=10, block_size=1)
    one = Fits.of(geometry, Layout(2), SMALL, interval=0, context=27, asked=1)
    two = Fits.of(geometry, Layout(2, 2), SMALL, interval=0, context=27, asked=2)
    assert (two.requests, two.checkpoints) == (2 * one.requests, 2 * one.checkpoints)
    assert two.longest_request == one.longest_request


def test_what_an_interval_costs_by_hand():
    geometry = Geometry(total_bytes=3300, state_bytes=30, block_bytes=10, block_size=1)
    off = IntervalCost.of(geometry, SMALL, 0)
    assert (off.states, off.state_bytes, off.share, off.worst_recompute) == (0, 0, 0, 18)
    # From 4 to 22 a grid of 8 has 8 and 16: gaps 4, 8, 6.
    eight = IntervalCost.of(geometry, SMALL, 8)
    assert (eight.states, eight.state_bytes, eight.worst_recompute) == (2, 60, 8)
    assert eight.share == pytest.approx(60 / 210)


def test_the_ceiling_of_a_profile_by_hand():
    # Prompts of 10, 15, 20; new are 6, 3, 3.
    assert SMALL.ceiling == pytest.approx(1 - 12 / 45)


def test_the_line_to_start_with_says_what_was_planned():
    plan = planned("--gpu-memory", "143771m", "--tp", "16", "--kv-cache-dtype", "fp8_e4m3",
                   "--kimi-k3-interval", "16384", "--context", "262144")  # fmt: skip
    line = shlex.join(plan.command)
    for words in (
        "sgl-kimi-k3 serve MODEL --tp-size 16 --kv-cache-dtype fp8_e4m3",
        "--mem-fraction-static 0.85 --context-length 262144",
        f"--max-running-requests {plan.fits.requests} --kimi-k3-interval 16384",
        "--reasoning-parser kimi_k3",
    ):
        assert words in line
    assert "--dtype" not in line.split()
    assert any("two_nodes.sh" in warning for warning in plan.warnings)


def test_the_simulated_ceiling_is_the_profiles():
    """The trace a profile stands for, replayed in an endless memory; answers' last tokens aside."""
    words = ["--max-total-tokens", "200000", "--max-mamba-cache-size", "100", "--tp", "8",
             "--prompt-tokens", "4096", "--shared-prefix", "2048", "--turn-tokens", "512",
             "--output-tokens", "128", "--turns", "4", "--conversations", "12"]  # fmt: skip
    parser = argparse.ArgumentParser()
    configure(parser)
    plan = plan_of(parser.parse_args([str(K3), *words]))
    (found,) = plan.expected
    assert (found.conversations, found.requests, found.refused) == (12, 96, 0)
    # 24 conversations of which the first cannot share: 2,048 tokens of 24 x 20,224.
    first = 2048 / (24 * sum(plan.traffic.profile.prompt_len(turn) for turn in range(4)))
    assert found.ceiling == pytest.approx(plan.traffic.profile.ceiling - first, abs=0.002)
    assert 0.5 * found.ceiling < found.hit_rate <= found.ceiling


@pytest.mark.parametrize(
    ("flag", "attribute", "words"),
    [
        ("--page-size 48", "page_size", ("--page-size", "48")),
    ],
)
def test_what_serve_refuses_is_said(flag, attribute, words):
    plan = planned("--gpu-memory", "268g", "--tp", "8", *words)
    assert any(flag in warning and "refuses" in warning for warning in plan.warnings)
    assert flag in shlex.join(plan.command)
    view = View()
    setattr(view, attribute, int(words[1]))
    with pytest.raises(ValueError, match=flag.split()[0]):
        resolution.refuse_unsupported(view)


def test_k3_over_ranks_that_share_a_cache_gets_its_pages_and_grid(monkeypatch):
    """SGLang's kernel takes pages of 64: 512 tokens on eight ranks, no multiple of which is 64."""
    one, eight = (planned("--gpu-memory", "268g", "--tp", "8", *words) for words in ((), DCP_8))
    line = shlex.join(eight.command)
    for words in ("--dcp-size 8", "--page-size 64", "--kimi-k3-grid 512"):
        assert words in line
    assert "--attention-backend" not in line
    assert any("Blackwell only" in warning for warning in eight.warnings)
    assert not any("these figures hold" in warning for warning in eight.warnings)
    assert eight.geometry.block_size == 512
    assert eight.fits.longest_request > 7 * one.fits.longest_request
    monkeypatch.setenv("KIMI_K3_GRID", "512")
    view = View()
    view.page_size, view.dcp_size, view.chunked_prefill_size = 64, 8, 8192
    resolution.refuse_unsupported(view)
    context_parallel.check_sizes(view)


def test_k3s_kernel_for_spread_rows_takes_two_page_sizes():
    words = ("--gpu-memory", "268g", "--tp", "8", *DCP_8, "--page-size")
    assert planned(*words, "32").geometry.block_size == 256
    with pytest.raises(ValueError, match=r"--page-size 1 with --dcp 8: .* pages of 32 or 64"):
        planned(*words, "1")


def test_a_text_tower_reads_spread_rows_with_flashinfer(tmp_path):
    config = json.loads(K3.read_text("utf-8"))["text_config"]
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["KimiK3LinearForCausalLM"]})
    )
    parser = argparse.ArgumentParser()
    configure(parser)
    words = ["--gpu-memory", "268g", "--tp", "8", "--dcp", "2", "--no-simulation"]
    plan = plan_of(parser.parse_args([str(tmp_path), "--weight-bytes", "1g", *words]))
    line = shlex.join(plan.command)
    assert "--dcp-size 2" in line
    assert "--attention-backend flashinfer" in line
    assert "--page-size" not in line
    assert "--kimi-k3-grid" not in line
    assert plan.geometry.block_size == 2


def test_attention_replicas_are_planned_and_told_of():
    plan = planned("--gpu-memory", "268g", "--tp", "8", "--dp-attention", "2")
    assert "--attn-dp-size 2" in shlex.join(plan.command)
    assert any("launch/dp_attention.sh" in warning for warning in plan.warnings)
    assert not any("refuses" in warning for warning in plan.warnings)
    resolution.check_attention_replicas(2, [plan.server.model.name])


def test_sglang_shares_given_states_among_replicas_and_not_tokens():
    """`KVCacheConfigurator` divides `--max-mamba-cache-size` by the replicas, nothing else."""
    words = ("--max-total-tokens", "100000", "--max-mamba-cache-size", "60", "--tp", "16")
    one, two = planned(*words), planned(*words, "--dp-attention", "2")
    assert one.geometry.total_bytes == 100_000 * 27_648 + 60 * 28_085_760
    assert two.geometry.total_bytes == 100_000 * 27_648 + 30 * 56_171_520


def test_a_kimi_linear_is_not_planned_into_a_refusal(tmp_path):
    config = json.loads(K3.read_text("utf-8"))["text_config"]
    config = {**config, "architectures": ["KimiLinearForCausalLM"], "attn_res_block_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    configure(parser)
    words = ["--gpu-memory", "900g", "--tp", "8", "--dp-attention", "2", "--no-simulation"]
    plan = plan_of(parser.parse_args([str(tmp_path), "--weight-bytes", "1g", *words]))
    assert any("refuses --attn-dp-size 2" in warning for warning in plan.warnings)


def test_json_and_table_tell_the_same(capsys):
    words = [str(K3), "--gpu-memory", "268g", "--tp", "8", "--no-simulation"]
    assert cli.main(["plan", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["state_bytes"] == 56_171_520
    assert told["token_bytes"] == 27_648
    assert told["max_states"] == planned(*words[1:-1]).geometry.max_states
    assert cli.main(["plan", *words]) == 0
    table = capsys.readouterr().out
    for number in (told["state_bytes"], told["arena_bytes"], told["fits"]["requests"]):
        assert f"{number:,}" in table


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gpu-memory", "143771m", "--tp", "8"], ("191.0 GiB", "--tp 16", "--weight-bytes")),
        (["--gpu-memory", "230g", "--tp", "8", "--mem-fraction-static", "0.8"],
         ("--mem-fraction-static 0.84", "230.0 GiB")),
        (["--gpu-memory", "268g", "--tp", "7"], ("--tp-size 7", "96")),
        (["--gpu-memory", "268g", "--tp", "8", "--dcp", "3"], ("--dcp 3", "8 ranks")),
        (["--gpu-memory", "268g", "--tp", "8", "--dp-attention", "3"], ("--dp-attention 3", "8")),
        (["--gpu-memory", "268g", "--tp", "8", "--kimi-k3-interval", "100"],
         ("KIMI_K3_INTERVAL=100", "64 and 128")),
        (["--gpu-memory", "268g", "--tp", "8", "--shared-prefix", "12000"],
         ("--shared-prefix 12000", "--prompt-tokens 12000")),
        (["--gpu-memory", "268g", "--tp", "8", "--context", "2000000"],
         ("--context 2000000", "1048576")),
        (["--gpu-memory", "268g", "--tp", "8", "--context", "0"], ("--context 0", "1048576")),
        (["--gpu-memory", "268g", "--max-total-tokens", "9"], ("drop", "--gpu-memory")),
        ([], ("--gpu-memory", "nvidia-smi")),
        (["--max-total-tokens", "9", "--max-mamba-cache-size", "2"],
         ("bytes are missing", "--max-total-tokens or --max-mamba-cache-size")),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(words, told, capsys):
    assert cli.main(["plan", str(K3), "--no-simulation", *words]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    for part in told:
        assert part in error


def test_sizes():
    assert size("140g") == size("143360m") == 140 << 30
    assert size("1.5T") == 3 << 39
    assert size("12345") == 12345
    for text in ("", "0g", "-1g", "1q", "g"):
        with pytest.raises(argparse.ArgumentTypeError):
            size(text)


def test_no_torch_and_no_sglang():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None\n"
        "from sgl_kimi_k3.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    argv = ["plan", str(K3), "--gpu-memory", "268g", "--tp", "8", "--turns", "2",
            "--conversations", "2", "--json"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
    )
    (expected,) = json.loads(done.stdout)["expected"]
    assert expected["requests"] == 8
    assert 0 < expected["hit_rate"] <= expected["ceiling"] < 1
