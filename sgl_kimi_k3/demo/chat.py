"""Six users talk to one museum guide over the OpenAI API; the cache's work becomes visible.

`python -m sgl_kimi_k3.demo.chat --base-url http://127.0.0.1:PORT [--json FILE]` needs a server
started with `--enable-cache-report`. It plays every user's first turn, then every second turn, and
so on, one request at a time, greedy and streaming; prints one line per turn; then plays all of it
again with the cache off and compares the sampled tokens. "Off" is a `cache_salt` of its own per
request: such a request shares a prefix with no other, in the same server.

Exit status 0 only if both runs sampled the same tokens and every turn resumed where it should
(`report.resume_problems`).
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from sgl_kimi_k3.config import Options
from sgl_kimi_k3.demo import report
from sgl_kimi_k3.demo.conversation import QUESTIONS, SYSTEM
from sgl_kimi_k3.demo.report import Turn

REPLY_TOKENS = 32
END_OF_MSG = "<|end_of_msg|>"


class Server:
    """The endpoints the demo uses, over one base URL such as `http://127.0.0.1:30000`."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx.Client(base_url=self.base_url, timeout=60.0)
        self._openai = openai.OpenAI(
            base_url=f"{self.base_url}/v1", api_key="none", timeout=600.0, max_retries=0
        )

    def info(self) -> dict[str, Any]:
        """SGLang's server arguments and version."""
        return self._get("/server_info").json()

    def metrics(self) -> str:
        """The Prometheus text; empty if the server was started without `--enable-metrics`."""
        answer = self._http.get("/metrics", follow_redirects=True)
        return answer.text if answer.is_success else ""

    def token(self, text: str) -> int:
        """Id of one control token."""
        answer = self._http.post("/tokenize", json={"prompt": text})
        answer.raise_for_status()
        (token,) = answer.json()["tokens"]
        return token

    def stream(
        self, messages: list[dict[str, str]], salt: str | None
    ) -> tuple[dict[str, str], Turn]:
        """One greedy request; the assistant's message to send back, and what it cost.

        The reply stands in the think channel, where K3's default mode opens it, so the message
        carries it as `reasoning_content`.
        """
        extra: dict[str, Any] = {
            "return_input_ids_in_sglext": True,
            "return_output_ids_in_sglext": True,
        }
        if salt is not None:
            extra["cache_salt"] = salt
        started = time.perf_counter()
        first: float | None = None
        reply = {"role": "assistant", "content": "", "reasoning_content": ""}
        ids: dict[str, Any] = {}
        usage = None
        for chunk in self._openai.chat.completions.create(
            model="default",
            messages=messages,  # type: ignore[arg-type] # reasoning_content is SGLang's own
            temperature=0,
            max_tokens=REPLY_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        ):
            ids = (chunk.model_extra or {}).get("sglext") or ids
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text = choice.delta.content or ""
                thought = getattr(choice.delta, "reasoning_content", None) or ""
                if first is None and (text or thought):
                    first = time.perf_counter() - started
                reply["content"] += text
                reply["reasoning_content"] += thought
        return reply, _turn(ids, usage, first)

    def _get(self, path: str) -> httpx.Response:
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer


def _turn(ids: dict[str, Any], usage: Any, first: float | None) -> Turn:
    details = usage.prompt_tokens_details if usage else None
    if details is None or details.cached_tokens is None:
        raise SystemExit("the server reports no cached tokens: start it with --enable-cache-report")
    if first is None or not ids.get("output_ids"):
        raise SystemExit("the reply was empty")
    return Turn(
        prompt_ids=tuple(ids["input_ids"]),
        output_ids=tuple(ids["output_ids"][0]),
        cached_tokens=details.cached_tokens,
        ttft_s=first,
    )


def play(server: Server, salt: str | None = None) -> Iterator[Turn]:
    """All turns, round by round: turn 1 of users 1 to 6, turn 2 of users 1 to 6, ...

    With a salt every request is alone in its own namespace, which is the cache switched off.
    """
    histories = [[{"role": "system", "content": SYSTEM}] for _ in QUESTIONS]
    for turn in range(len(QUESTIONS[0])):
        for user, history in enumerate(histories):
            history.append({"role": "user", "content": QUESTIONS[user][turn]})
            own = None if salt is None else f"{salt}-{user}-{turn}"
            reply, measured = server.stream(history, own)
            history.append(reply)
            yield measured.of(user + 1, turn + 1)


def main(arguments: list[str] | None = None) -> int:
    """Play both runs, print the tables, write the JSON; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base-url", required=True, help="e.g. http://127.0.0.1:30000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--grid",
        type=int,
        default=Options().grid,
        help="tokens between checkpoint positions, KIMI_K3_GRID of the server (%(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        return _run(Server(options.base_url), options.grid, options.json)
    except (httpx.HTTPError, openai.APIError) as error:
        print(f"FAILED  {options.base_url} did not answer: {error!r}")
        return 1


def _run(server: Server, grid: int, json_path: Path | None) -> int:
    end_of_msg = server.token(END_OF_MSG)

    print(report.header(), flush=True)
    cached = []
    for turn in play(server):
        cached.append(turn)
        print(report.line(turn), flush=True)
    hit_rate = report.hit_rate(cached)
    print(f"token hit rate {hit_rate:.1%}  (cached tokens / prompt tokens, all turns)")

    plain = []
    salt = f"off-{time.time_ns()}"  # no run shares a namespace with an earlier one
    for turn in play(server, salt):
        plain.append(turn)
        if turn.user == len(QUESTIONS):
            print(f"the same chat with the cache off: turn {turn.turn} done", flush=True)
    different = report.differences(cached, plain)
    problems = report.resume_problems(cached, end_of_msg, grid)
    problems += [
        f"{t.name}: {t.cached_tokens} tokens came from the cache though it was off"
        for t in plain
        if t.cached_tokens
    ]
    for problem in [*different, *problems]:
        print(f"FAILED  {problem}")
    if not different:
        sampled = sum(len(turn.output_ids) for turn in cached)
        print(f"outputs equal: {sampled} greedy tokens, cache on and cache off")
    summary = report.server_summary(server.info(), server.metrics())
    print(
        f"metrics    {server.base_url}/metrics\ndashboard  launch/dashboards/kimi_k3.json (Grafana)"
    )
    if json_path:
        report.write_json(json_path, cached, outputs_equal=not different, server=summary)
    return 1 if different or problems else 0


if __name__ == "__main__":
    sys.exit(main())
