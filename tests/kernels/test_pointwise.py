"""Gates, norms, router and residual mix against the libraries that define them."""

import pytest
import torch
from torch import Tensor

from sgl_kimi_k3.kernels import naive, pointwise


def randn(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(*shape)


@pytest.mark.parametrize("lower_bound", [-5.0, -2.0, None])
def test_gate_is_flas(lower_bound) -> None:
    from fla.ops.kda import gate

    logits, a_log, bias = 4 * randn(30, 3, 8), randn(3, seed=1), randn(24, seed=2)
    if lower_bound is None:
        expected = gate.naive_kda_gate(logits, a_log, bias)
    else:
        expected = gate.naive_kda_lowerbound_gate(logits, a_log, bias, lower_bound)
    out = pointwise.log_decay(logits, a_log, bias, lower_bound)
    torch.testing.assert_close(out.float(), expected, rtol=1e-5, atol=1e-6)
    assert bool((out <= 0).all())
    if lower_bound is not None:
        assert bool((out >= lower_bound).all())


def test_safe_gate_is_transformers() -> None:
    """Their module adds the projections; with identity-like ones only the gate is left."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    class Config:
        hidden_size = linear_head_dim = 8
        linear_num_heads = 3
        linear_lower_bound = -5.0

    gate = Glm5NextTextForgetGate(Config())
    torch.manual_seed(3)
    for param in gate.parameters():
        torch.nn.init.normal_(param)
    x = randn(1, 20, 8)
    logits = gate.f_b_proj(gate.f_a_proj(x)).view(20, 3, 8)
    out = pointwise.log_decay(logits, gate.A_log.flatten(), gate.dt_bias.flatten(), -5.0)
    torch.testing.assert_close(out.float(), gate(x)[0].view(20, 3, 8), rtol=1e-5, atol=1e-5)


def test_the_bounded_gate_is_no_clamp_of_the_other() -> None:
    logits, a_log, bias = 4 * randn(30, 3, 8), randn(3, seed=1), randn(24, seed=2)
    clamped = pointwise.log_decay(logits, a_log, bias, None).clamp(min=-5.0)
    assert (clamped - pointwise.log_decay(logits, a_log, bias, -5.0)).abs().max() > 1


def test_mix_is_flas() -> None:
    from fla.ops.attnres.naive import naive_attnres

    rows, query, weight = randn(4, 10, 32), randn(32, seed=1), randn(32, seed=2)
    expected = naive_attnres(query, list(rows), weight, rms_eps=1e-5)
    torch.testing.assert_close(pointwise.mix(rows, query, weight, 1e-5), expected)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ(linear_beta) -> None:
    gate, up = 10 * randn(50, 8), 40 * randn(50, 8, seed=1)
    out = pointwise.situ_and_mul(gate, up, 4.0, linear_beta)
    left = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate)
    right = up if linear_beta is None else 25 * torch.tanh(up / 25)
    torch.testing.assert_close(out, left * right)


def test_gated_norm_is_transformers() -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

    norm = KimiLinearRMSNormGated(16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, gate = randn(9, 3, 16), randn(9, 3, 16, seed=1)
    torch.testing.assert_close(
        pointwise.gated_norm(x, gate, norm.weight, 1e-5), norm(x, gate), rtol=1e-5, atol=1e-6
    )


def test_router_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = randn(40, 12), 3 * randn(12, seed=1)
    weights, chosen = pointwise.route(logits, bias, 4, renormalise=True, scale=2.5)
    scores = torch.sigmoid(logits.double())
    for t in range(40):
        best = torch.argsort(scores[t] + bias.double(), descending=True)[:4]
        assert chosen[t].tolist() == sorted(best.tolist())
        expected = scores[t, chosen[t]]
        torch.testing.assert_close(weights[t], 2.5 * expected / expected.sum())


def test_norms_round_once_to_the_input_dtype() -> None:
    x, weight = randn(5, 64).bfloat16(), randn(64, seed=1)
    expected = naive.rms_norm(x.double(), weight.double(), 1e-6).bfloat16()
    assert torch.equal(pointwise.rms_norm(x, weight, 1e-6), expected)


def test_latent_attention_is_the_expanded_one() -> None:
    """Absorbing `kv_b_proj` changes nothing; the scale is that of the expanded head."""
    heads, nope, rope, rank, v_dim, tokens = 3, 8, 4, 16, 6, 11
    q, latent, shared = randn(tokens, heads, nope + rope), randn(tokens, rank), randn(tokens, rope)
    w_k, w_v = randn(heads, nope, rank, seed=3), randn(heads, rank, v_dim, seed=4)
    keys = torch.cat(
        (torch.einsum("tr,hdr->thd", latent, w_k), shared[:, None].expand(-1, heads, -1)), -1
    )
    values = torch.einsum("tr,hrv->thv", latent, w_v)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    query = torch.cat((torch.einsum("thd,hdr->thr", q[..., :nope], w_k), q[..., nope:]), -1)
    rows = torch.cat((latent, shared), -1)
    out = naive.latent_attention(query, rows, rank, (nope + rope) ** -0.5)
    torch.testing.assert_close(torch.einsum("thr,hrv->thv", out, w_v), expected)


@pytest.mark.parametrize("width", [1, 2, 3, 48])
@pytest.mark.parametrize("function", [naive.sigmoid, pointwise.silu])
def test_an_elements_bits_do_not_depend_on_its_place(function, width) -> None:
    """torch's own sigmoid and silu fail this on CPUs with AVX2 only."""
    x = torch.randn(37, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = function(x)
    torch.testing.assert_close(naive.sigmoid(x), torch.sigmoid(x))
    for stop in range(1, 37):
        assert torch.equal(function(x[:stop].clone()), whole[:stop])
