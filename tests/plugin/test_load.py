"""The benchmarks' client: a request that a server gave up is a failure, however it says so."""

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.bench import load


def event(count: int, **meta: object) -> dict:
    return {
        "output_ids": list(range(50, 50 + count)),
        "meta_info": {"completion_tokens": count, "cached_tokens": 3, **meta},
    }


ANSWERS = {
    "served": [event(1), event(2, finish_reason={"type": "length", "length": 2})],
    "aborted in the queue": [
        {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "full"}}}
    ],
    "aborted half way": [event(1), event(1, finish_reason={"type": "abort", "message": "lost"})],
    "refused": [{"error": {"message": "too long"}}],
}


class Handler(BaseHTTPRequestHandler):
    """Streams one answer as SGLang's `/generate` does."""

    answer: list[dict]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for one in self.answer:
            self.wfile.write(f"data: {json.dumps(one)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_was_given_up_is_a_failure(server: HTTPServer, answer: str) -> None:
    Handler.answer = ANSWERS[answer]
    todo: queue.SimpleQueue = queue.SimpleQueue()
    todo.put([load.Turn([1, 2, 3, 4], 2)])
    figures = load.closed_loop(f"http://127.0.0.1:{server.server_port}", todo, 1)
    served = answer == "served"
    assert (figures["requests"], len(figures["failures"])) == ((1, 0) if served else (0, 1))
    assert not served or figures["token_hit_rate"] == 3 / 4


@pytest.mark.parametrize("incremental", [False, True])
def test_an_answer_is_all_its_tokens_however_events_bring_them(
    server: HTTPServer, incremental: bool
) -> None:
    """One at first, then three, then the end without a new one."""
    ids, counts = [50, 51, 52, 53], [1, 4, 4]
    Handler.answer = [
        {
            "output_ids": ids[start if incremental else 0 : count],
            "meta_info": {"completion_tokens": count, "cached_tokens": 0},
        }
        for start, count in zip([0, *counts], counts, strict=False)
    ]
    found, result = load.generate(f"http://127.0.0.1:{server.server_port}", [1], 4)
    assert found == ids
    assert (result.output_tokens, len(result.gaps_s)) == (4, 3)


def test_an_events_gap_is_shared_among_its_tokens() -> None:
    """Behind the first event; one without new tokens ends no wait, and one token has no gap."""
    result = load.Result(9, 0, 0.0)
    assert not result.note(0.4, 0)
    assert result.note(0.5, 2)
    assert (result.ttft_s, result.tpot_s) == (0.5, 0)
    noted = [result.note(*event) for event in ((0.3, 5), (0.9, 5), (1.2, 6))]
    assert noted == [True, False, True]
    assert result.gaps_s == pytest.approx([0.1, 0.1, 0.1, 1.2])
    assert result.tpot_s == pytest.approx(0.375)


def test_a_paced_client_catches_up_and_says_that_it_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [100.0], []
    monkeypatch.setattr(load.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(load.time, "sleep", slept.append)
    pace = load.Pace(100.5, 2.0)
    for then in (100.0, 101.0, 107.0, 107.1):
        now[0] = then
        assert pace.wait(end=108.0)
    assert slept == pytest.approx([0.5, 1.5, 0.0, 0.0])
    assert (pace.due, pace.late) == (108.5, 2)
    assert not pace.wait(end=108.0)
    pace = load.Pace(0.0, 0.0)  # a closed loop is never late
    assert pace.wait(end=108.0)
    assert not pace.wait(end=107.0)
    assert (len(slept), pace.late) == (4, 0)
