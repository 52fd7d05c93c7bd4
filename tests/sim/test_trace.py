"""Reading traces: tokens from block ids, what continues what, and files that are no traces."""

import gzip
import json

import numpy as np
import pytest

from radix.sim.trace import read
from radix.tokens import common_len
from sgl_kimi_k3.trace import TraceWriter


def row(ids, length, output=0, at=0, **more):
    lengths = {"timestamp": at, "input_length": length, "output_length": output, "block_size": 4}
    return lengths | {"hash_ids": ids} | more


@pytest.fixture
def written(tmp_path):
    def write(*rows, packed=False):
        path = tmp_path / "trace.jsonl"
        text = "".join(json.dumps(one) + "\n" for one in rows)
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        return read(path)

    return write


def test_tokens_are_equal_where_ids_are(written):
    trace = written(row([5, 6], 8), row([5, 7], 7, output=2, at=1))
    first, second = (request.tokens() for request in trace.requests)
    assert first.dtype == np.int64
    assert first.tolist() == [20, 21, 22, 23, 24, 25, 26, 27]
    assert len(second) == 9
    assert common_len(first, second) == 4
    assert trace.requests[1].computed_len == 8


def test_new_ids_extend_the_sessions_previous_list(written):
    trace = written(
        row([1, 2, 3], 12, session="a", prefix_blocks=0),
        row([9], 4, session="b", prefix_blocks=0, at=1),
        row([4], 12, session="a", prefix_blocks=2, at=2),
        packed=True,
    )
    assert [list(request.ids) for request in trace.requests] == [[1, 2, 3], [9], [1, 2, 4]]


@pytest.mark.parametrize("session", [{}, {"session": 1}])
def test_an_answer_is_what_the_next_prompt_shows(written, session):
    """6 tokens and 3 of an answer; the next prompt goes on from there and ends within a block."""
    trace = written(row([1, 2], 6, 3, **session), row([1, 7, 8, 9], 14, 5, at=1, **session))
    first, second = (request.tokens() for request in trace.requests)
    assert common_len(first, second) == 9
    assert len(set(second.tolist())) == len(second) == 19


def test_an_answer_that_no_prompt_shows_is_nobody_elses(written):
    trace = written(
        row([1, 2], 8, 4, session=1), row([1, 3], 8, 4, session=1), row([1, 2], 8, 4, session=2)
    )
    first, second, third = (request.tokens() for request in trace.requests)
    assert common_len(first, second) == 4
    assert common_len(first, third) == 8


def test_a_recording_is_sorted_by_arrival(written):
    trace = written(row([1], 4, at=5), row([2], 4, at=3))
    assert [request.arrival_us for request in trace.requests] == [3000, 5000]
    assert [request.number for request in trace.requests] == [0, 1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "line 1 is no request"),
        ("{", "line 1 is no request"),
        ('{"timestamp": 0}', "no 'input_length'"),
        (json.dumps(row([1], 9)), "9 tokens fill 2 blocks of 4, got 1 ids"),
        (json.dumps(row([-1], 4)), "block id -1 is negative"),
        (json.dumps(row([], 0)), "input 0"),
        (json.dumps(row([1], 4)) + "\n" + json.dumps(row([1], 4) | {"block_size": 8}), "mixes"),
        ("", "holds no request"),
        ("\x1f\x8b", "cannot read"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, line, reason):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line.encode("latin-1"))
    with pytest.raises(ValueError, match=reason) as error:
        read(path)
    assert "trace.jsonl" in str(error.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the trace .*nowhere"):
        read(tmp_path / "nowhere")


def test_a_servers_recording_replays(tmp_path):
    """Two turns of one tenant share 9 tokens; another tenant's equal prompt shares none."""
    writer = TraceWriter(str(tmp_path / "trace.jsonl"), 4)
    writer.request("a", np.arange(6))
    writer.request("b", np.arange(6), "tenant")
    writer.finished("b", 1)
    writer.finished("a", 3)
    writer.request("c", np.arange(12))
    writer.finished("c", 1)
    found = {
        len(r.ids) * 10 + r.output_len: r.tokens() for r in read(tmp_path / "trace.jsonl").requests
    }
    first, other, second = found[33], found[21], found[41]
    assert common_len(first, second) == 9
    assert common_len(other, second) == 0
