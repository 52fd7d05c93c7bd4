"""A state advanced by the accepted steps of a window, from what they were fed (case E1)."""

import pytest
import torch

from sgl_kimi_k3.kernels import naive, pointwise, replay
from sgl_kimi_k3.kernels.conv import conv_decode
from sgl_kimi_k3.kernels.decode import kda_decode
from sgl_kimi_k3.windows import Windows, window_bytes
from tests.interpreter import said_by
from tests.kernels.inputs import operands, state
from tests.kernels.replay_inputs import CHANNELS, LAYERS, TOKENS, Draft


def window(requests: int, tokens: int = 6):
    """k, v, log decay and beta, [requests, tokens, ...] each."""
    parts = operands(requests * tokens)
    return tuple(part.unflatten(0, (requests, tokens)) for part in parts[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_accepted_steps_are_decode_steps_bit_for_bit(dtype: torch.dtype) -> None:
    accepted = torch.tensor([1, 6, 0, 4])
    parts = window(len(accepted))
    start = torch.stack([state(seed=n) for n in range(len(accepted))]).to(dtype)
    before = start.clone()
    folded = replay.fold(*parts, start, accepted)
    assert start.equal(before)
    for row, count in enumerate(accepted.tolist()):
        one = start[row : row + 1]
        for step in range(count):
            k, v, log_a, beta = (part[row : row + 1, step] for part in parts)
            _, one = kda_decode(torch.randn_like(k), k, v, log_a, beta, one)
        assert folded[row].equal(one[0]), row


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_it_is_the_recurrence(lower_bound: float | None) -> None:
    parts = operands(6, lower_bound=lower_bound)
    start = state().double()
    folded = replay.fold(
        *(part[None].double() for part in parts[1:]), start[None], torch.tensor([6])
    )
    _, expected = naive.delta_rule(*(part.double() for part in parts), start)
    torch.testing.assert_close(folded[0], expected, rtol=1e-12, atol=1e-12)


def test_it_is_flas() -> None:
    """fla keeps its state [H, K, V], expects a normalised k, and computes in float32."""
    from fla.ops.kda.naive import naive_recurrent_kda

    parts, start = operands(6), state()
    folded = replay.fold(*(part[None] for part in parts[1:]), start[None], torch.tensor([4]))
    k = naive.l2_normalise(parts.k)
    _, expected = naive_recurrent_kda(
        *(part[None, :4] for part in (k, k, parts.v, parts.log_a, parts.beta)),
        initial_state=start.transpose(-1, -2)[None],
        output_final_state=True,
    )
    torch.testing.assert_close(folded[0], expected[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_the_rows_are_the_last_inputs(count: int) -> None:
    torch.manual_seed(0)
    inputs, rows, weight = torch.randn(1, 5, 7), torch.randn(1, 3, 7), torch.randn(7, 4)
    folded = replay.fold_rows(inputs, rows, torch.tensor([count]))
    one = rows
    for step in range(count):
        _, one = conv_decode(inputs[:, step], weight, one)
    assert folded.equal(one)


def test_windows_advance_the_batch_in_place_and_nothing_else() -> None:
    """Requests in any slots; rejected steps leave no trace in any layer."""
    drafts = [Draft.random(index, -5.0, requests=3) for index in range(LAYERS)]
    windows = Windows(Draft.params(), layers=LAYERS, requests=4, tokens=TOKENS, device="cpu")
    for index, draft in enumerate(drafts):
        windows.keep(index, draft.layer, **draft.parts())
    cache, before = Draft.cache(slots=7), Draft.cache(slots=7)
    slots, accepted = [5, 0, 3], [1, TOKENS, 3]
    windows.fold(cache, torch.tensor(slots), torch.tensor(accepted, dtype=torch.int32))
    for index, draft in enumerate(drafts):
        layer = draft.layer
        gates = pointwise.gates(draft.a, draft.b, layer.A_log, layer.dt_bias, layer.lower_bound)
        for row, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
            wanted, rows = before.temporal[index, [slot]], before.conv[0][index, [slot]]
            for step in range(count):
                k, v, log_a, beta = (part[[row], step] for part in (draft.k, draft.v, *gates))
                _, wanted = kda_decode(k, k, v, log_a, beta, wanted)
                _, rows = conv_decode(draft.mixed[[row], step], torch.ones(CHANNELS, 4), rows)
            assert cache.temporal[index, slot].equal(wanted[0])
            assert cache.conv[0][index, slot].equal(rows[0])
    others = [1, 2, 4, 6]
    assert cache.temporal[:, others].equal(before.temporal[:, others])
    assert cache.conv[0][:, others].equal(before.conv[0][:, others])


def test_what_a_window_takes() -> None:
    """K3 at TP 8, 69 layers of 12 heads of 128 by 128: 1.5 KB a head and step.

    A float32 state for each of its steps would be 43 times that.
    """
    params = Draft.params()
    params.shape.conv, params.shape.temporal = [(3, 3 * 12 * 128)], (12, 128, 128)
    params.dtype.conv = torch.bfloat16
    taken = window_bytes(params, layers=69, tokens=8)
    assert taken == 69 * 8 * 12 * (6 * 128 + 1) * 2
    assert 42 < 69 * 8 * 12 * 128 * 128 * 4 / taken < 43


AS_ONE_BY_ONE = [f"as one by one; lower bound {bound}" for bound in (-5.0, None)]


def test_stocks_kernels_in_the_interpreter() -> None:
    """Verified, then all layers folded at once: the bits of tokens fed one by one."""
    assert said_by("tests.kernels.interpret_replay", "cpu") == AS_ONE_BY_ONE


@pytest.mark.gpu
def test_stocks_kernels_on_a_gpu() -> None:
    assert said_by("tests.kernels.interpret_replay", "cuda", interpreted=False) == AS_ONE_BY_ONE
