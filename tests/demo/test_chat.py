"""The chat client against a stand-in server that speaks SGLang's dialect of the OpenAI API.

The stand-in renders prompts with the real tokenizer and answers with words drawn from the prompt's
hash, so that a reply depends on its whole history, and caches whole prefixes per `cache_salt`.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sgl_kimi_k3.demo import chat, conversation, report, tokenizer


class StandIn(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, small_k3, *, forget=0, noise=False, cache_report=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.forget, self.noise = small_k3, forget, noise
        self.cache_report = cache_report
        self.seen = {}  # salt -> token sequences fed so far
        self.requests = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, body):
        self.requests += 1
        prompt = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )
        fed = self.seen.setdefault(body.get("cache_salt"), [])
        cached = max((report.common_len(prompt, known) for known in fed), default=0)
        cached = max(0, min(cached, len(prompt) - 1) - self.forget)
        words = tokenizer.vocabulary().words
        text = repr((prompt, self.noise and self.requests)).encode()
        digest = hashlib.sha256(text).digest()
        output = [words[b % len(words)] for b in digest[: body["max_tokens"]]]
        fed.append(prompt + output[:-1])
        return prompt, output, cached


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_args):
        pass

    def do_GET(self):
        known = {"/server_info": {"version": "0.5.23", "radix_cache_backend": "kimi_k3"}}
        self.reply("application/json", json.dumps(known.get(self.path, {})))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        small_k3 = self.server.tokenizer
        if self.path == "/tokenize":
            tokens = small_k3.encode(body["prompt"])
            return self.reply("application/json", json.dumps({"tokens": tokens}))
        prompt, output, cached = self.server.answer(body)
        deltas = [{"choices": [choice(reasoning_content=small_k3.decode([i]))]} for i in output]
        ids = {"sglext": {"input_ids": prompt, "output_ids": [output]}, "choices": []}
        usage = {"prompt_tokens": len(prompt) - 3, "completion_tokens": len(output)}
        usage["total_tokens"] = sum(usage.values())
        if self.server.cache_report:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        chunks = [*deltas, ids, {"choices": [], "usage": usage}]
        frames = [f"data: {json.dumps(envelope | chunk)}\n\n" for chunk in chunks]
        return self.reply("text/event-stream", "".join(frames) + "data: [DONE]\n\n")

    def reply(self, kind, text):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


envelope = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}


def choice(**delta):
    return {"index": 0, "delta": delta, "finish_reason": None}


@pytest.fixture
def serve(small_k3):
    running = []

    def start(**options):
        server = StandIn(small_k3, **options)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_good_server_passes_and_the_json_says_so(serve, tmp_path, capsys):
    server = serve()
    out = tmp_path / "out.json"
    assert chat.main(["--base-url", server.url, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["outputs_equal"] is True
    assert [(t["user"], t["turn"]) for t in result["turns"]] == [
        (user, turn) for turn in range(1, 5) for user in range(1, 7)
    ]
    assert result["turns"][0]["cached_tokens"] == 0
    assert result["hit_rate"] > 0.8
    printed = capsys.readouterr().out
    assert f"{server.url}/metrics" in printed
    assert "FAILED" not in printed
    assert server.requests == 48


def test_a_server_that_resumes_too_early_fails(serve, capsys):
    assert chat.main(["--base-url", serve(forget=100).url, "--grid", "64"]) == 1
    assert "user 1 turn 2: resumed at" in capsys.readouterr().out


def test_a_server_whose_cache_changes_the_reply_fails(serve, capsys):
    assert chat.main(["--base-url", serve(noise=True).url]) == 1
    assert "sampled tokens differ" in capsys.readouterr().out


def test_a_server_without_the_cache_report_is_told_so(serve):
    with pytest.raises(SystemExit, match="--enable-cache-report"):
        chat.main(["--base-url", serve(cache_report=False).url])


def test_the_shared_system_prompt_is_long_enough():
    assert len(tokenizer.build().encode(conversation.SYSTEM).ids) >= 600
    assert len(conversation.QUESTIONS) == 6
    assert {len(questions) for questions in conversation.QUESTIONS} == {4}
