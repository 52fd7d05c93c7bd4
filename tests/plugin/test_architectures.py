"""What one flag resolves to on CUDA: SGLang's own argument resolution, in a process of its own.

Stock's lists of hybrids leave the text-only K3 class out; ours must run it too, overlapped.
"""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sgl_kimi_k3 import resolution

TEXT = {
    "model_type": "kimi_linear", "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256,
    "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "hidden_act": "silu", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 2, "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip
ARCHITECTURES = {
    "KimiLinearForCausalLM": TEXT,
    "KimiK3LinearForCausalLM": {**TEXT, "hidden_act": "situ"},
    "KimiK3ForConditionalGeneration": {"model_type": "kimi_k3", "text_config": TEXT},
}
FLAGS = (
    ["--page-size", "1"],
    ["--page-size", "64"],
    ["--kv-cache-dtype", "fp8_e4m3", "--mamba-ssm-dtype", "bfloat16"],
)
# How prefills are captured then, and up to how many tokens.
GRAPHS = (
    ([], "breakable", 2048),
    (["--chunked-prefill-size", "1024"], "breakable", 1024),
    (["--max-total-tokens", "512"], "breakable", 512),
    (["--cuda-graph-max-bs-prefill", "4096"], "breakable", 4096),
    (["--cuda-graph-bs-prefill", "64", "96"], "breakable", None),
    (["--cuda-graph-config", '{"prefill": {"max_bs": 256}}'], "breakable", 256),
    (["--disable-prefill-cuda-graph"], "disabled", None),
    (["--disable-cuda-graph"], "disabled", None),
    (["--cuda-graph-backend-prefill", "disabled"], "disabled", None),
    (["--speculative-algorithm", "NGRAM"], "disabled", None),
    (
        ["--lora-paths", "x=/nowhere", "--max-lora-rank", "8", "--lora-target-modules", "all"],
        "disabled",
        None,
    ),
    (["--linear-attn-prefill-backend", "flashkda"], "disabled", None),
    (["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"], "disabled", None),
)
SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
from sglang.srt.server_args import prepare_server_args
found = []
for folder, flags in json.loads(sys.argv[1]):
    args = prepare_server_args([
        "--model-path", folder, "--device", "cuda", "--load-format", "dummy",
        "--skip-tokenizer-init", "--attention-backend", "triton", "--mem-fraction-static", "0.5",
        "--radix-cache-backend", "kimi_k3", *flags])
    args.resolve_once()
    view = resolved_view(args)
    found.append({"hybrid": uses_ssm_state(model_config_of(args)), **{name: getattr(view, name)
        for name in ("mamba_radix_cache_strategy", "enable_unified_memory", "page_size",
                     "disable_overlap_schedule", "disable_radix_cache", "linear_attn_backend",
                     "linear_attn_prefill_backend",
                     "kv_cache_dtype", "mamba_ssm_dtype")},
        "prefill_graphs": [view.cuda_graph_config.prefill.backend,
                           view.cuda_graph_config.prefill.max_bs]})
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    """Resolved arguments by architecture and flags."""
    cases = {}
    for name, config in ARCHITECTURES.items():
        folder = tmp_path_factory.mktemp(name)
        text = json.dumps({"architectures": [name], **config})
        folder.joinpath("config.json").write_text(text, "utf-8")
        every = [*FLAGS, *(flags for flags, _, _ in GRAPHS)]
        cases |= {(name, tuple(flags)): (str(folder), flags) for flags in every}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(list(cases.values()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    return dict(zip(cases, json.loads(done.stdout.split("FOUND")[1]), strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_class_is_a_hybrid_with_states_overlapped(resolved, name):
    for flags in FLAGS:
        found = resolved[name, tuple(flags)]
        assert found["hybrid"]
        assert found["mamba_radix_cache_strategy"] == "no_buffer"
        assert found["enable_unified_memory"]
        assert not found["disable_overlap_schedule"]
        assert not found["disable_radix_cache"]
        assert found["linear_attn_backend"] == "triton"
        assert found["linear_attn_prefill_backend"] == "triton", "it writes states inside a pass"
        asked = dict(zip(flags[::2], flags[1::2], strict=True))
        assert found["page_size"] == int(asked.get("--page-size", 1))
        assert found["kv_cache_dtype"] == asked.get("--kv-cache-dtype", "auto")
        assert found["mamba_ssm_dtype"] == asked.get("--mamba-ssm-dtype")


@pytest.mark.parametrize(("flags", "backend", "tokens"), GRAPHS)
def test_prefills_are_captured_where_that_has_been_run(resolved, flags, backend, tokens):
    """SGLang leaves it off for KDA; of the operator's own words none is changed."""
    for name in ARCHITECTURES:
        found = resolved[name, tuple(flags)]["prefill_graphs"]
        assert found[0] == backend
        assert tokens is None or found[1] == tokens


class Graphed(SimpleNamespace):
    """Resolved flags of a server whose prefills are captured."""

    def __init__(self, **changed) -> None:
        graphs = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"))
        super().__init__(
            **{
                "device": "cuda", "dcp_size": 1, "attn_dp_size": 1, "speculative_algorithm": None,
                "enable_two_batch_overlap": False, "enable_lora": None, "lora_paths": None,
                "enable_deterministic_inference": False, "enable_memory_saver": False,
                "linear_attn_backend": "triton", "linear_attn_prefill_backend": None,
                "moe_a2a_backend": "none", "cuda_graph_config": graphs,
                "_cuda_graph_config_locked": set(), **changed,
            }
        )  # fmt: skip


@pytest.fixture
def view_is_args(monkeypatch):
    """What was resolved is what was given."""
    monkeypatch.setattr(resolution, "resolving_view", lambda args: args)
    monkeypatch.setattr(resolution, "resolved_view", lambda args: args)


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "cpu"},
        {"dcp_size": 2},
        {"attn_dp_size": 2},
        {"speculative_algorithm": "NGRAM"},
        {"enable_two_batch_overlap": True},
        {"enable_lora": True},
        {"lora_paths": ["a"]},
        {"enable_deterministic_inference": True},
        {"enable_memory_saver": True},
        {"linear_attn_backend": "flashinfer"},
        {"linear_attn_prefill_backend": "flashkda"},
        {"moe_a2a_backend": "deepep"},
        {"_cuda_graph_config_locked": {("prefill", "backend")}},
    ],
    ids=str,
)
@pytest.mark.usefixtures("view_is_args")
def test_what_was_not_run_with_graphs_goes_without(changed) -> None:
    assert resolution.may_graph_prefills(Graphed(), list(ARCHITECTURES)[:1])
    assert not resolution.may_graph_prefills(Graphed(), ["LlamaForCausalLM"])
    assert not resolution.may_graph_prefills(Graphed(**changed), list(ARCHITECTURES)[:1])


@pytest.mark.usefixtures("view_is_args")
def test_the_portable_model_is_not_captured(monkeypatch) -> None:
    monkeypatch.setenv("KIMI_K3_MODEL", "portable")
    assert not resolution.may_graph_prefills(Graphed(), list(ARCHITECTURES)[:1])


def test_graphs_of_a_spread_prefix_are_refused() -> None:
    resolution.check_prefill_graphs(Graphed(dcp_size=2))
    asked = Graphed(dcp_size=2)
    asked.cuda_graph_config.prefill.backend = "breakable"
    with pytest.raises(ValueError, match=r"--cuda-graph-backend-prefill breakable .*--dcp-size 2"):
        resolution.check_prefill_graphs(asked)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_another_prefill_kernel_is_the_operators_to_choose(resolved, name) -> None:
    found = resolved[name, ("--linear-attn-prefill-backend", "flashkda")]
    assert found["linear_attn_prefill_backend"] == "flashkda"
