"""States written inside a prefill pass."""

from types import SimpleNamespace

import pytest
import torch

from sgl_kimi_k3 import state_pass
from sgl_kimi_k3.state_pass import Plan
from tests.interpreter import said_by
from tests.kernels.state_pass_inputs import Inputs

CPU = torch.device("cpu")


def test_a_plan_names_chunks_slots_and_ends() -> None:
    """Sequences of 130 and 70 tokens have 3 and 2 chunks; the second starts at token 130."""
    plan = Plan.of([130, 70], [(0, 64, 6), (0, 128, 7), (1, 64, 1)])
    assert plan.targets.tolist() == [-1, 6, 7, -1, 1]
    assert plan.firsts.tolist() == [0, 3]
    assert plan.places.tolist() == [1, 2, 4]
    assert plan.slots.tolist() == [6, 7, 1]
    assert plan.ends.tolist() == [64, 128, 194]


@pytest.mark.parametrize("tokens", [0, 63, 128])
def test_a_place_the_kernel_does_not_pass_is_refused(tokens: int) -> None:
    with pytest.raises(AssertionError):
        Plan.of([128], [(0, tokens, 1)])


@pytest.fixture
def layers(monkeypatch):
    """One forward as a server's KDA layers make it, up to the kernel: metadata, then the walk."""
    walks = []
    monkeypatch.setattr(state_pass, "pass_states", lambda *_, **kwargs: walks.append(kwargs))
    mode = SimpleNamespace(is_extend_without_speculative=lambda: True)
    found = SimpleNamespace(has_mamba_track_mask=False)
    backend = SimpleNamespace(forward_metadata=found, conv_states_shape=(8, 3))
    names = ("k", "w", "u", "gk", "initial_state", "initial_state_indices", "cu_seqlens")

    def run(*, convolve: bool = True, walk: bool = True) -> str:
        if convolve:
            state_pass.metadata(lambda *_: None, backend, SimpleNamespace(forward_mode=mode))
        if walk:
            operands = dict.fromkeys(names, 0)
            return state_pass.chunk_states(lambda **_: "stock's", use_exp2=True, **operands)
        return ""

    return SimpleNamespace(run=run, found=found, walks=walks)


def test_layers_that_read_the_plan_say_so(layers) -> None:
    """States at 64 of a sequence from token 0: the convolution's rows are tokens 61 to 63."""
    with state_pass.writing(Plan.of([130], [(0, 64, 6)]), CPU) as writing:
        assert not writing.done
        layers.run()
        assert writing.done
    assert layers.found.track_conv_indices.tolist() == [[61, 62, 63]]
    assert layers.found.conv_states_mask_indices.tolist() == [6]
    assert [walk["targets"].tolist() for walk in layers.walks] == [[-1, 6, -1]]
    assert layers.run() == "stock's", "a forward that writes no states is stock's own"


@pytest.mark.parametrize("missing", ["convolve", "walk"])
def test_half_a_state_is_none(layers, missing: str) -> None:
    with state_pass.writing(Plan.of([130], [(0, 64, 6)]), CPU) as writing:
        layers.run(**{missing: False})
    assert not writing.done


def test_the_kernel_in_the_interpreter() -> None:
    """As stock's, and as the definition says."""
    assert said_by("tests.kernels.interpret_state_pass") == [
        "as stock's",
        "as the definition",
        "the same in tables with room to spare",
        "the warm-up leaves every state as it is",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "heads"), [([16384], 12), ([1, 64, 65, 4000, 128], 16), ([300] * 20, 12)]
)
def test_the_kernel_on_a_gpu(lengths: list[int], heads: int) -> None:
    """K3's head sizes: what stock's kernel gives, bit for bit, and exact states beside it."""
    inputs = Inputs.random(
        lengths, heads=heads, key_size=128, value_size=128, dtype=torch.bfloat16, device="cuda"
    )
    inputs.compare_with_stock(tolerance=0.0)  # the same bits
    inputs.compare_with_truth(tolerance=1e-2)  # operands of 16 bits
