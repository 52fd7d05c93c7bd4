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


def test_time_per_output_token_is_the_mean_gap_of_a_request() -> None:
    """However its events were bunched; an answer of one token has none."""
    bunched = load.Result(9, 0, 0.5, gaps_s=[0.0, 0.0, 0.9], output_tokens=4)
    assert bunched.tpot_s == pytest.approx(0.3)
    late = load.Result(9, 0, 0.5, gaps_s=[0.1], output_tokens=9, first_tokens=8)
    assert late.tpot_s == pytest.approx(0.1)
    assert load.Result(9, 0, 0.5, output_tokens=1).tpot_s == 0
