"""A window by stock's kernels as a GPU runs them; on a CPU needs TRITON_INTERPRET=1.

The truth is a server without drafts: the same kernels fed the accepted tokens one by one, writing
rows and states as they go.
"""

import sys
import warnings
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.linear.kda_backend import causal_conv1d_update
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

from sgl_kimi_k3 import drafts
from sgl_kimi_k3.windows import Windows
from tests.kernels.replay_inputs import HEADS, K_DIM, LAYERS, TOKENS, V_DIM, WIDTH, Draft

SLOTS, ACCEPTED = [5, 0, 3], [1, TOKENS, 3]
KERNEL = TritonKDAKernel()


def layer_of(draft: Draft, index: int) -> SimpleNamespace:
    """What SGLang's KDA layer shows of itself, on the draft's device."""
    width = HEADS * K_DIM
    return SimpleNamespace(
        **vars(draft.layer),
        layer_id=index,
        q_dim=width,
        k_dim=width,
        v_dim=HEADS * V_DIM,
        head_q_dim=K_DIM,
        head_k_dim=K_DIM,
        head_v_dim=V_DIM,
        bias=None,
        conv_weights=torch.randn(2 * width + HEADS * V_DIM, WIDTH, device=draft.mixed.device),
    )


def one_by_one(layer, states, rows, draft, row, count):
    """Feed `count` tokens of a request's window; states and rows [slots, ...] are its slot's."""
    outs = []
    slot = torch.tensor([SLOTS[row]], device=states.device, dtype=torch.int32)
    for step in range(count):
        mixed = causal_conv1d_update(
            draft.mixed[row, step][None],
            rows.transpose(-1, -2),
            layer.conv_weights,
            activation="silu",
            conv_state_indices=slot,
        )
        q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
        outs.append(
            KERNEL.decode(
                q.view(1, 1, HEADS, K_DIM),
                k.view(1, 1, HEADS, K_DIM),
                v.view(1, 1, HEADS, V_DIM),
                draft.a[row, step].reshape(1, -1),
                draft.b[row, step][None, None],
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                ssm_states=states,
                cache_indices=slot,
                query_start_loc=torch.tensor([0, 1], device=states.device, dtype=torch.int32),
                lower_bound=layer.lower_bound,
            )[0, 0]
        )
    return torch.stack(outs)


def check(lower_bound: float | None, device: str, dtype: torch.dtype) -> None:
    """Three requests accept 1, all and 3 steps; a fourth row pads the batch."""
    drafts_ = [
        Draft.random(index, lower_bound, requests=4).to(device, dtype) for index in range(LAYERS)
    ]
    layers = [layer_of(draft, index) for index, draft in enumerate(drafts_)]
    cache, wanted = Draft.cache(7, device, dtype), Draft.cache(7, device, dtype)
    windows = Windows(Draft.params(dtype), layers=LAYERS, requests=5, tokens=TOKENS, device=device)
    indices = torch.tensor([*SLOTS, -1], device=device, dtype=torch.int32)
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(
            windows=windows,
            mamba_map={index: index for index in range(LAYERS)},
            mamba2_layer_cache=lambda index: SimpleNamespace(
                conv=[cache.conv[0][index]], temporal=cache.temporal[index]
            ),
        ),
        forward_metadata=SimpleNamespace(
            mamba_cache_indices=indices,
            query_start_loc=torch.arange(5, device=device, dtype=torch.int32) * TOKENS,
        ),
        kernel_dispatcher=SimpleNamespace(triton_kernel=KERNEL),
    )
    for index, (layer, draft) in enumerate(zip(layers, drafts_, strict=True)):
        out = drafts.verify(
            None,
            backend,
            layer,
            None,
            draft.mixed.flatten(0, 1),
            draft.a.flatten(0, 1)[None],
            draft.b.flatten(0, 1)[None],
        ).unflatten(1, (4, TOKENS))[0]
        for row, count in enumerate(ACCEPTED):
            states, rows = wanted.temporal[index], wanted.conv[0][index]
            said = one_by_one(layer, states, rows, draft, row, count)
            assert out[row, :count].equal(said), (index, row)
    before = Draft.cache(7, device, dtype)
    assert cache.temporal.equal(before.temporal)
    assert cache.conv[0].equal(before.conv[0])
    ends = indices[:3].long(), torch.tensor(ACCEPTED, device=device)
    in_torch = Draft.cache(7, device, dtype)
    windows.fold_in_torch(in_torch, *ends)
    torch.testing.assert_close(in_torch.temporal, wanted.temporal, rtol=1e-4, atol=1e-4)
    windows.fold_by_kernel(cache, *ends)
    assert cache.temporal.equal(wanted.temporal)
    assert cache.conv[0].equal(wanted.conv[0])
    print("as one by one; lower bound", lower_bound)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on = sys.argv[1]
    for bound in (-5.0, None):
        check(bound, on, torch.float32 if on == "cpu" else torch.bfloat16)
