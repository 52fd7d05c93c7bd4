"""One KDA layer whose prefill is captured as SGLang captures it, and the same layer run without."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sgl_kimi_k3 import hooks, state_pass
from sgl_kimi_k3.state_pass import CHUNK, Plan

SIZE = 128  # of a head
SLOTS = 64
ROWS = 3  # that the convolution looks back


@dataclass
class Bucket:
    """A layer of random weights, its pool, and the graph of its prefill for up to `tokens`."""

    tokens: int
    heads: int
    layer: Any
    backend: Any
    meta: Any
    dispatcher: Any
    conv: torch.Tensor
    states: torch.Tensor
    inputs: dict[str, torch.Tensor]
    graph: torch.cuda.CUDAGraph | None = None
    out: torch.Tensor | None = None

    @classmethod
    def capture(cls, *, tokens: int, heads: int) -> Bucket:
        """As `KDAAttnBackend` and `PrefillCudaGraphRunner` do."""
        from sglang.srt.layers.attention.linear import kda_backend
        from sglang.srt.layers.attention.linear.kda_prefill_graph import KDAPrefillGraphMetadata
        from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

        hooks.apply(hooks.PASS_HOOKS)
        generator = torch.Generator("cuda").manual_seed(heads)

        def normal(*shape, scale=1.0, dtype=torch.bfloat16):
            return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)

        width = heads * SIZE
        layer = SimpleNamespace(
            q_dim=width, k_dim=width, v_dim=width, head_q_dim=SIZE, head_k_dim=SIZE,
            head_v_dim=SIZE, bias=None, lower_bound=None, layer_id=0,
            conv_weights=normal(3 * width, ROWS + 1, scale=0.3),
            A_log=normal(1, 1, heads, 1, scale=0.1, dtype=torch.float32),
            dt_bias=normal(width, scale=0.1, dtype=torch.float32),
        )  # fmt: skip
        meta = KDAPrefillGraphMetadata.allocate(
            num_tokens=tokens,
            max_seqs_cap=32,
            track=False,
            cache_index_dtype=torch.int64,
            device=torch.device("cuda"),
        )
        made = cls(
            tokens=tokens,
            heads=heads,
            layer=layer,
            backend=SimpleNamespace(
                conv_states_shape=(3 * width, ROWS), prefill_graph_metadata=None
            ),
            meta=meta,
            dispatcher=TritonKDAKernel(),
            conv=normal(SLOTS, ROWS, 3 * width),
            states=normal(SLOTS, heads, SIZE, SIZE, scale=0.2, dtype=torch.float32),
            inputs={
                "mixed_qkv": normal(tokens, 3 * width),
                "a": normal(1, tokens, heads, SIZE, scale=0.5),
                "b": normal(1, tokens, heads),
            },
        )
        made._fill([tokens], None)
        for _ in range(2):  # compiled, then captured
            made.out = made._graphed(kda_backend)
        torch.cuda.synchronize()
        made.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(made.graph):
            made.out = made._graphed(kda_backend)
        return made

    def _graphed(self, kda_backend: Any) -> torch.Tensor:
        return kda_backend.kda_extend_in_graph(
            layer=self.layer,
            meta=self.meta,
            conv_pool=self.conv,
            ssm_states=self.states,
            kernel_dispatcher=self.dispatcher,
            **self.inputs,
        )

    def _fill(self, lengths: list[int], prefix: torch.Tensor | None) -> None:
        from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

        rows = torch.arange(len(lengths), device="cuda") + 1
        batch = SimpleNamespace(
            mamba_track_indices=None,
            mamba_track_mask=None,
            extend_seq_lens_cpu=lengths,
            extend_prefix_lens=torch.zeros_like(rows) if prefix is None else prefix,
        )
        KDAAttnBackend._fill_prefill_graph_metadata(
            self.backend, meta=self.meta, forward_batch=batch, cache_indices=rows
        )

    def compare(self, lengths: list[int]) -> None:
        """A replay for this batch, every other sequence resumed, and each sequence run alone.

        A state written inside is what a pass that ends there leaves.
        """
        places = [(row, at) for row, n in enumerate(lengths) for at in range(CHUNK, n, CHUNK)]
        wanted = [(row, at, SLOTS - 1 - i) for i, (row, at) in enumerate(places)]
        prefix = torch.tensor([row % 2 * 5 for row in range(len(lengths))], device="cuda")
        self.states[1 : len(lengths) + 1 : 2] = 0  # what a new request's slot holds
        conv, states = self.conv.clone(), self.states.clone()
        with state_pass.writing(Plan.of(lengths, wanted), torch.device("cuda")) as writing:
            self._fill(lengths, prefix)
            self.graph.replay()
        assert writing.done
        replayed = self.conv.clone(), self.states.clone(), self.out.clone()
        start = 0
        for row, n in enumerate(lengths):
            ends = [(at, slot) for of, at, slot in wanted if of == row] + [(n, row + 1)]
            for at, slot in ends:
                out, rows, state = self._alone(
                    start, at, conv[row + 1], states[row + 1], resumed=bool(row % 2)
                )
                same(replayed[0][slot], rows)
                same(replayed[1][slot], state)
            same(replayed[2][0, start : start + n], out)
            start += n
        named = {slot for _, _, slot in wanted} | set(range(1, len(lengths) + 1))
        others = [slot for slot in range(SLOTS) if slot not in named]
        assert torch.equal(replayed[0][others], conv[others])
        assert torch.equal(replayed[1][others], states[others])
        assert not replayed[2][0, start:].any(), "rows that only fill up the bucket are zero"
        self.conv.copy_(conv)
        self.states.copy_(states)

    def _alone(
        self, start: int, tokens: int, conv: torch.Tensor, state: torch.Tensor, *, resumed: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What stock's eager layer computes of one sequence: output, rows, state."""
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

        conv, state = conv[None].clone(), state[None].clone()
        spans = {
            name: one[start : start + tokens] if one.ndim == 2 else one[:, start : start + tokens]
            for name, one in self.inputs.items()
        }
        starts = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        row = torch.zeros(1, dtype=torch.int32, device="cuda")
        mixed = causal_conv1d_fn(
            spans["mixed_qkv"].transpose(0, 1),
            self.layer.conv_weights,
            None,
            activation="silu",
            conv_states=conv.transpose(-1, -2),
            has_initial_state=torch.tensor([resumed], device="cuda"),
            cache_indices=row,
            query_start_loc=starts,
            seq_lens_cpu=[tokens],
        ).transpose(0, 1)
        q, k, v = (
            one.unflatten(-1, (-1, SIZE)).unsqueeze(0)
            for one in mixed.split([self.layer.q_dim] * 3, dim=-1)
        )
        out = self.dispatcher.extend(
            q=q,
            k=k,
            v=v,
            g=spans["a"],
            beta=spans["b"],
            ssm_states=state,
            cache_indices=row,
            query_start_loc=starts,
            A_log=self.layer.A_log,
            dt_bias=self.layer.dt_bias,
            lower_bound=None,
            beta_is_raw=True,
        )
        return out[0], conv[0], state[0]


def same(found: torch.Tensor, right: torch.Tensor) -> None:
    """Equal up to what kernels of another tile order round in 16 bits."""
    scale = right.float().abs().max()
    error = (found.float() - right.float()).abs().max()
    assert error <= 1e-2 * scale + 1e-6, (error, scale)
