"""What a process of SGLang resolves after the plugin has run."""

import json
import subprocess
import sys

import pytest
import torch
from sglang.srt.configs.mamba_utils import mamba2_state_dtype

from sgl_kimi_k3.attention.mla import attend
from sgl_kimi_k3.kernels import naive
from sgl_kimi_k3.models import exact_state_dtype


def in_new_process(code: str, **env: str) -> dict[str, object]:
    """Run code after the plugin's registration; it prints one JSON object last."""
    before = "from sgl_kimi_k3.models import register_portable; register_portable()\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", before + code],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


RESOLVE = """
import json, sys
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
from sglang.srt.models.registry import ModelRegistry
names = ["KimiK3LinearForCausalLM", "KimiLinearForCausalLM"]
found = {n: ModelRegistry.resolve_model_cls([n])[0].__module__ for n in names}
shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=4)
dtype = KimiLinearCacheParams(shape=shape, layers=[0]).dtype
found["states"] = [str(dtype.conv), str(dtype.temporal)]
found["stock models imported"] = sum(m.startswith("sglang.srt.models.") for m in sys.modules) > 60
print(json.dumps(found))
"""
OURS = {
    "KimiK3LinearForCausalLM": "sgl_kimi_k3.models.kimi_k3",
    "KimiLinearForCausalLM": "sgl_kimi_k3.models.kimi_k3",
    "states": ["torch.float32", "torch.float64"],
}


def test_the_architectures_resolve_to_the_portable_model() -> None:
    """Without a CUDA device; the registry does not import stock's model files for it."""
    expected = OURS | {"stock models imported": False}
    assert in_new_process(RESOLVE, CUDA_VISIBLE_DEVICES="") == expected


def test_beside_another_external_package() -> None:
    """The operator's own package keeps its place; `json` stands for one without models."""
    found = in_new_process(RESOLVE, CUDA_VISIBLE_DEVICES="", SGLANG_EXTERNAL_MODEL_PACKAGE="json")
    assert found.items() >= OURS.items()


@pytest.mark.parametrize(
    ("env", "conv", "temporal"),
    [
        ({"SGLANG_MAMBA_SSM_DTYPE": "float32"}, torch.float32, torch.float32),
        ({"SGLANG_MAMBA_CONV_DTYPE": "float16"}, torch.float16, torch.float64),
    ],
)
def test_an_operators_choice_of_state_types_is_kept(monkeypatch, env, conv, temporal) -> None:
    for name in ("SGLANG_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_CONV_DTYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    dtypes = exact_state_dtype(mamba2_state_dtype)
    assert (dtypes.conv, dtypes.temporal) == (conv, temporal)


@pytest.mark.parametrize(("tokens", "depth"), [(1, 0), (1, 30), (7, 0), (5, 40)])
def test_attention_is_the_truth(tokens, depth) -> None:
    torch.manual_seed(tokens)
    q, rows = torch.randn(tokens, 3, 12).double(), torch.randn(depth + tokens, 12).double()
    expected = naive.latent_attention(q, rows, 8, 0.3)
    torch.testing.assert_close(attend(q, rows, 8, 0.3, depth), expected)
    later = torch.cat((rows, torch.full((3, 12), float("nan"))))
    torch.testing.assert_close(attend(q, later, 8, 0.3, depth), expected)
