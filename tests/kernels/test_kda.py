"""Chunked prefill and the decode step against the recurrence in float64."""

import inspect

import pytest
import torch

from sgl_kimi_k3.kernels import naive
from sgl_kimi_k3.kernels.decode import kda_decode
from sgl_kimi_k3.kernels.prefill import CHUNK, kda_prefill
from tests.kernels.inputs import operands, state, wide

LENGTHS = (1, 15, 16, 17, 63, 64, 65)
# The only float32 roundings are the state's, one per chunk or step.
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def truth(parts, start):
    return naive.delta_rule(*wide(parts), start.double())


def prefill(parts, start, depth=0):
    out, final = kda_prefill(*parts, states=start[None], lens=[len(parts.q)], depths=[depth])
    return out, final[0]


def decode(parts, start):
    outputs = []
    for t in range(len(parts.q)):
        out, start = kda_decode(*parts.part(t, t + 1), start.view(1, *start.shape[-3:]))
        outputs.append(out[0])
    return torch.stack(outputs), start.view(start.shape[-3:])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("depth", [0, 5])
def test_prefill_is_the_recurrence(length, lower_bound, depth) -> None:
    parts, start = operands(length, lower_bound=lower_bound), state()
    out, final = prefill(parts, start, depth)
    expected, expected_final = truth(parts, start)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(final.double(), expected_final, **CLOSE)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_step_by_step_decode(length, lower_bound) -> None:
    parts, start = operands(length, lower_bound=lower_bound), torch.zeros(3, 40, 24)
    for got, expected in zip(prefill(parts, start), decode(parts, start), strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("cut", [1, 3, 15, 16, 17, 32, 47, 64])
@pytest.mark.parametrize("depth", [0, 16, 21])
def test_a_cut_anywhere_goes_on_from_the_stored_state(cut, depth) -> None:
    """Bit for bit where the cut stands on the chunk grid, to rounding elsewhere (cases D4, D6)."""
    parts, start = operands(65), state()
    out, final = prefill(parts, start, depth)
    head, middle = prefill(parts.part(0, cut), start, depth)
    tail, resumed = prefill(parts.part(cut, 65), middle, depth + cut)
    joined = torch.cat((head, tail))
    if (depth + cut) % CHUNK == 0:
        assert torch.equal(joined, out)
        assert torch.equal(resumed, final)
    else:
        torch.testing.assert_close(joined, out, **CLOSE)
        torch.testing.assert_close(resumed, final, **CLOSE)


def test_sequences_of_a_batch_do_not_touch() -> None:
    """Three requests off the chunk grid (cases C10): each equals itself alone, bit for bit."""
    lens, depths = [50, 70, 33], [0, 7, 128]
    parts = operands(sum(lens))
    states = torch.stack([state(seed=i) for i in range(3)])
    out, final = kda_prefill(*parts, states=states, lens=lens, depths=depths)
    start = 0
    for i, length in enumerate(lens):
        alone, alone_final = prefill(parts.part(start, start + length), states[i], depths[i])
        assert torch.equal(out[start : start + length], alone)
        assert torch.equal(final[i], alone_final)
        start += length


def test_decode_rows_do_not_touch() -> None:
    parts = operands(5)
    states = torch.stack([state(seed=i) for i in range(5)])
    out, final = kda_decode(*parts, states)
    for i in range(5):
        alone, alone_final = kda_decode(*parts.part(i, i + 1), states[i : i + 1])
        assert torch.equal(out[i : i + 1], alone)
        assert torch.equal(final[i : i + 1], alone_final)


def test_a_decay_to_nothing_stays_finite() -> None:
    """An unbounded softplus gate may ask for e^-1000 per token; its inverse must not overflow."""
    parts, start = operands(40), state()
    parts = parts._replace(log_a=torch.full_like(parts.log_a, -1000.0))
    out, final = prefill(parts, start)
    expected, expected_final = truth(parts, start)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(final.double(), expected_final, **CLOSE)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_truth_is_flas(lower_bound) -> None:
    """fla keeps its state [H, K, V] and expects normalised q and k."""
    from fla.ops.kda.naive import naive_recurrent_kda

    parts, start = wide(operands(40, lower_bound=lower_bound)), state().double()
    q, k = naive.l2_normalise(parts.q), naive.l2_normalise(parts.k)
    out, final = naive_recurrent_kda(
        q[None],
        k[None],
        parts.v[None],
        parts.log_a[None],
        parts.beta[None],
        initial_state=start.transpose(-1, -2)[None],
        output_final_state=True,
    )
    expected, expected_final = naive.delta_rule(*parts, start)
    # fla's naive code computes in float32.
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        final[0].transpose(-1, -2).double(), expected_final, rtol=1e-4, atol=1e-5
    )


def test_the_truth_is_transformers() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    parts, start = operands(70, k_dim=32, v_dim=32), state(k_dim=32, v_dim=32)
    # Beneath the wrapper that would call fla's Triton kernels.
    chunked = inspect.unwrap(theirs.chunk_kimi_delta_attention)
    out, final = chunked(
        *(x[None] for x in parts[:3]),
        g=parts.log_a[None],
        beta=parts.beta[None],
        initial_state=start.transpose(-1, -2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    expected, expected_final = truth(parts, start)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        final[0].transpose(-1, -2).double(), expected_final, rtol=1e-4, atol=1e-5
    )
