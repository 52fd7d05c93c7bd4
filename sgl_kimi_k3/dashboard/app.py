"""The web server: one page in one file, its numbers, and the watched server's own endpoints.

The page asks nobody but this server, so a browser needs no access to SGLang, and an API key stays
here. `/metrics` and the cache's part of `/server_info` are passed on; launch arguments are not, as
keys are among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sgl_kimi_k3.dashboard.names import ALL
from sgl_kimi_k3.dashboard.view import curves

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from sgl_kimi_k3.dashboard.watcher import Watcher

LONGEST_WINDOW_S, SHORTEST_WINDOW_S = 3600.0, 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; img-src data:; "
    "style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'self'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page() -> str:
    """The page with its styles, scripts and chart library in it."""
    folder = files("sgl_kimi_k3.dashboard") / "page"

    def content(found: re.Match[str]) -> str:
        text = (folder / found["name"]).read_text("utf-8")
        tag = "style" if found["name"].endswith(".css") else "script"
        return f"<{tag}>\n{text}</{tag}>"

    text = (folder / "index.html").read_text("utf-8")
    declared = "".join(f"const {name} = {json.dumps(table)};\n" for name, table in ALL.items())
    text = text.replace("<!-- names -->", f"<script>\n{declared}</script>")
    return re.sub(r"<!-- (?P<name>\S+\.(?:css|js)) -->", content, text)


def app(watcher: Watcher, *, host: str = "127.0.0.1") -> Starlette:
    """The application; it polls `watcher` as long as it runs.

    On a loopback `host` only requests under a loopback name are answered: a web page elsewhere
    cannot reach it by pointing its own name here.
    """

    @contextlib.asynccontextmanager
    async def polling(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(watcher.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await watcher.aclose()

    async def index(_: Request) -> Response:
        return HTMLResponse(page(), headers=HEADERS)

    async def view(request: Request) -> Response:
        text = request.query_params.get("window", "300")
        try:
            window_s = float(text)
        except ValueError:
            window_s = 0.0
        if not SHORTEST_WINDOW_S <= window_s <= LONGEST_WINDOW_S:
            told = f"window={text}: must be {SHORTEST_WINDOW_S:g} to {LONGEST_WINDOW_S:g} seconds"
            return JSONResponse({"error": told}, status_code=400)
        found = {**watcher.summary(window_s), "curves": curves(watcher.history, window_s)}
        return JSONResponse(found, headers=HEADERS)

    async def metrics(_: Request) -> Response:
        try:
            answer = await watcher.ask("/metrics")
        except httpx.HTTPError as error:
            return PlainTextResponse(f"{watcher.url}: {error}\n", status_code=502)
        return PlainTextResponse(answer.text, status_code=answer.status_code, headers=HEADERS)

    async def server_info(_: Request) -> Response:
        states = [{"kimi_k3": report} for report in watcher.reports]
        return JSONResponse({"internal_states": states}, headers=HEADERS)

    hosts = [*LOOPBACK, f"[{LOOPBACK[-1]}]"] if host in LOOPBACK else ["*"]
    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/view", view),
            Route("/metrics", metrics),
            Route("/server_info", server_info),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
            Middleware(GZipMiddleware),
        ],
        lifespan=polling,
    )
