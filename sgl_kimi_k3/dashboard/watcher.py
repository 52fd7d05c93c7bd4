"""Asks one SGLang server for `/metrics` and `/server_info`, again and again, and remembers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from sgl_kimi_k3.dashboard.history import History
from sgl_kimi_k3.dashboard.sample import of_metrics, of_reports
from sgl_kimi_k3.dashboard.view import Json, notices, summary

if TYPE_CHECKING:
    from collections.abc import Callable

METRICS_TIMEOUT_S, INFO_TIMEOUT_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Status:
    """How the server stands.

    Attributes:
        state: "waiting" (not asked yet), "ok", "unreachable", "denied" (needs another API key), or
            "unknown" (it answers, but not as an SGLang server).
        cache: "on", "off" (prefix caching switched off), "other" (not this backend), or "unknown".
        message: a sentence for people; empty if all is well.
        heard_at: when it last answered, seconds since 1970.
    """

    state: str = "waiting"
    cache: str = "unknown"
    message: str = ""
    heard_at: float | None = None
    metrics: bool | None = None  # whether it was started with --enable-metrics
    model: str | None = None
    version: str | None = None


class Watcher:
    """One server: whether it answers, and the history of what it said.

    `clock` gives seconds since 1970; `client` is for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        interval_s: float = 2.0,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.url = server_url(url)
        self.interval_s = interval_s
        self.history = History(interval_s)
        self.status = Status()
        self.reports: list[Json] = []
        self._clock = clock
        self._client = client or httpx.AsyncClient(follow_redirects=True)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pending: asyncio.Task[Json] | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            started = time.monotonic()
            await self.poll()
            await asyncio.sleep(max(0.1, self.interval_s - (time.monotonic() - started)))

    async def poll(self) -> None:
        """One round. `/server_info` waits for the scheduler's next step, `/metrics` does not."""
        try:
            info = await self._info()
            sample = await self._sample()
        except httpx.HTTPStatusError as error:
            self._fail(*_refusal(self.url, error.response))
        except httpx.HTTPError as error:
            self._fail("unreachable", f"Server not reachable at {self.url}: {_reason(error)}.")
        except ValueError:
            self._fail("unknown", f"{self.url} answers, but not like an SGLang server.")
        else:
            if info is not None:
                self._learn(info)
            if sample is None and info is not None and self.reports:
                sample = of_reports(self.reports, self._clock())
            if sample is not None:
                self.history.add(sample)
            self.status = replace(self.status, state="ok", heard_at=self._clock())

    async def aclose(self) -> None:
        """Drop the connections."""
        if self._pending is not None:
            self._pending.cancel()
        await self._client.aclose()

    def summary(self, window_s: float) -> Json:
        """Everything but the curves: `view.summary`, the status and what should be noticed."""
        found = summary(self.history, self.reports, window_s)
        status = self.status
        return {
            **found,
            "server": {"url": self.url, "model": status.model, "version": status.version},
            "status": {
                "state": status.state,
                "cache": status.cache,
                "message": status.message,
                "heard_at": status.heard_at,
                "metrics": status.metrics,
                "retry_s": self.interval_s,
            },
            "notices": notices(found) if status.state == "ok" else [],
        }

    # -- asking --

    async def _sample(self) -> Any:
        answer = await self._get("/metrics", METRICS_TIMEOUT_S)
        told = answer.status_code != httpx.codes.NOT_FOUND
        self.status = replace(self.status, metrics=told)
        if not told:
            return None
        answer.raise_for_status()
        return of_metrics(answer.text, self._clock())

    async def _info(self) -> Json | None:
        """The newest answer; None while the scheduler is busy with a long step."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._ask_info())
        first = self.status.state != "ok"
        done, _ = await asyncio.wait(
            [self._pending], timeout=INFO_TIMEOUT_S if first else self.interval_s
        )
        if not done:
            return None
        task, self._pending = self._pending, None
        return task.result()

    async def _ask_info(self) -> Json:
        answer = await self._get("/server_info", INFO_TIMEOUT_S)
        answer.raise_for_status()
        info = answer.json()
        if not isinstance(info, dict) or not isinstance(info.get("internal_states"), list):
            raise ValueError("no internal states")  # noqa: TRY004  # what the server said
        return info

    async def ask(self, path: str) -> httpx.Response:
        """Any endpoint of the server, once; httpx.HTTPError if it does not answer."""
        return await self._get(path, METRICS_TIMEOUT_S)

    async def _get(self, path: str, timeout_s: float) -> httpx.Response:
        return await self._client.get(self.url + path, headers=self._headers, timeout=timeout_s)

    def _learn(self, info: Json) -> None:
        states = info["internal_states"]
        self.reports = [state["kimi_k3"] for state in states if "kimi_k3" in state]
        cache, message = "on", ""
        if info.get("disable_radix_cache"):
            cache = "off"
            message = "Caching is off: the server was started with --disable-radix-cache."
        elif info.get("radix_cache_backend") != "kimi_k3":
            cache = "other"
            message = (
                "This server does not run the kimi_k3 backend, so there is nothing to show about "
                "its cache. Start it with: sgl-kimi-k3 serve MODEL"
            )
        self.status = replace(
            self.status,
            cache=cache,
            message=message,
            model=info.get("served_model_name") or info.get("model_path"),
            version=info.get("version"),
        )

    def _fail(self, state: str, message: str) -> None:
        self.status = replace(self.status, state=state, message=message)


def server_url(text: str) -> str:
    """The base URL of a server; ValueError if it is none.

    >>> server_url("127.0.0.1:30000/")
    'http://127.0.0.1:30000'
    """
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    try:
        sound = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment:
        raise ValueError(f"--server {text}: must be a URL such as http://127.0.0.1:30000")
    return url.rstrip("/")


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ConnectError) and "refused" in str(error).lower():
        return "connection refused"
    if isinstance(error, httpx.ConnectError) and "all connection attempts" in str(error).lower():
        return "connection refused"
    return str(error) or type(error).__name__


def _refusal(url: str, answer: httpx.Response) -> tuple[str, str]:
    if answer.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        return "denied", f"{url} asks for an API key, or another one: pass it with --api-key."
    if answer.status_code == httpx.codes.NOT_FOUND:
        return "unknown", f"{url} answers, but not like an SGLang server."
    return "unreachable", f"{url} answers with status {answer.status_code}."
