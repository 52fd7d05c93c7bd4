"""States that a prefill writes when a CUDA graph replays it."""

from types import SimpleNamespace

import pytest
import torch

from sgl_kimi_k3 import prefill_graphs, state_pass
from sgl_kimi_k3.prefill_graphs import Tables
from sgl_kimi_k3.state_pass import Plan
from tests.kernels.prefill_graph_inputs import Bucket

CPU = torch.device("cpu")
PLAN = Plan.of([130, 70], [(0, 64, 6), (0, 128, 7), (1, 64, 1)])


def test_tables_name_a_chunks_slot_and_the_rows_before_it() -> None:
    """States after 64, 128 and 194 of the batch's tokens; the convolution looks back 3 rows."""
    tables = Tables.of(7, CPU)
    tables.fill(PLAN, conv_rows=3)
    slots, modes, starts = tables.rows.tolist()
    assert slots == [-1, 6, 7, -1, 1, -1, -1]
    assert modes == [0, 2, 2, 0, 2, 0, 0]
    assert [start for start, mode in zip(starts, modes, strict=True) if mode] == [61, 125, 191]


def test_a_replay_without_states_writes_none() -> None:
    """Not those of the replay before it, either."""
    tables = Tables.of(7, CPU)
    place = tables.rows.data_ptr()
    for plan in (PLAN, None, None, PLAN, None):
        tables.fill(plan, conv_rows=3)
        assert (plan is None) == tables.empty == (not tables.rows[1].any())
    assert tables.rows[0].tolist() == [-1] * 7
    assert tables.rows.data_ptr() == place, "the graph reads where it was captured"


@pytest.fixture
def backend():
    return SimpleNamespace(conv_states_shape=(8, 3))


@pytest.fixture
def capture(backend, monkeypatch):
    """Capture one bucket: its tables are filled, then a layer runs up to the kernels."""
    copied = []
    monkeypatch.setattr(prefill_graphs, "kda_track_conv_window", lambda **kw: copied.append(kw))
    monkeypatch.setattr(state_pass, "pass_states", lambda *_, **kwargs: kwargs)
    names = ("k", "w", "u", "gk", "initial_state", "initial_state_indices", "cu_seqlens")
    operands = dict.fromkeys((*names, "use_exp2"), 1)

    def run(tokens: int, *, walk: bool = True, gate=torch.zeros(1, 5, 2, 4)):  # noqa: B008
        meta = bucket(tokens)
        prefill_graphs.fill(lambda *_, **__: None, backend, meta=meta)

        def layer(*, a, **_):
            assert a.shape == (1, 5, 8), "the gate's channels in one axis: beta is raw"
            if not walk:
                return None
            return prefill_graphs.chunk_states(lambda **_: "stock's", chunk_offsets=9, **operands)

        return prefill_graphs.extend(layer, meta=meta, conv_pool=0, mixed_qkv=0, a=gate)

    run.copied = copied
    return run


def bucket(tokens: int):
    return SimpleNamespace(
        num_tokens=tokens,
        chunk_indices=range(tokens // 64 + 4),
        packed=torch.zeros(1),
        num_logical_tokens=None,
    )


def test_a_captured_layer_walks_with_its_buckets_tables(backend, capture) -> None:
    found = capture(256)
    assert found["targets"].data_ptr() == backend.kimi_k3_tables[256].rows.data_ptr()
    assert found["firsts"] == 9, "SGLang's own table of where sequences' chunks begin"
    backend.kimi_k3_tables[256].fill(PLAN, conv_rows=3)
    copied = capture.copied[0]
    assert copied["track_dst"][:5].tolist() == [-1, 6, 7, -1, 1]
    assert copied["track_mode"][:5].tolist() == [0, 2, 2, 0, 2]
    assert copied["track_conv_start"][:5].tolist() == [0, 61, 125, 0, 191]
    assert prefill_graphs.chunk_states(lambda **_: "stock's") == "stock's", "outside of the layer"


def test_a_replay_says_that_the_states_are_written(backend, capture) -> None:
    capture(256)
    capture(512)
    with state_pass.writing(PLAN, CPU) as writing:
        prefill_graphs.fill(lambda *_, **__: None, backend, meta=bucket(256))
        assert writing.done
    assert not backend.kimi_k3_tables[256].empty
    assert backend.kimi_k3_tables[512].empty


def test_a_bucket_captured_with_another_kernel_writes_none(backend, capture) -> None:
    """FlashInfer's prefill walks without ours: the slots are given back, nobody resumes them."""
    capture(256, walk=False)
    with state_pass.writing(PLAN, CPU) as writing:
        prefill_graphs.fill(lambda *_, **__: None, backend, meta=bucket(256))
    assert not writing.done


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 12])
def test_replays_leave_what_forwards_leave(heads: int) -> None:
    """One captured bucket, batches of every shape: outputs, live and written states."""
    captured = Bucket.capture(tokens=512, heads=heads)
    for lengths in ([500], [130, 64, 70], [1] * 20, [511], [65, 64, 200]):
        captured.compare(lengths)
