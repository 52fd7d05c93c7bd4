"""A recorded server, told over HTTP without a network."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from sgl_kimi_k3.dashboard.watcher import Watcher

RECORDED = Path(__file__).with_name("recorded")
METRICS = (RECORDED / "metrics.prom").read_text("utf-8")
URL = "http://127.0.0.1:30000"


class Recorded:
    """What a server answers, changeable between two readings; its clock is turned by hand."""

    def __init__(self):
        self.metrics = METRICS
        self.info = json.loads((RECORDED / "server_info.json").read_text("utf-8"))
        self.key = None
        self.down = False
        self.now = 1000.0
        self.soon = None
        self.asked = []

    @property
    def report(self):
        return self.info["internal_states"][0]["kimi_k3"]

    def count(self, name, value):
        """Set a series without labels of its own."""
        self.metrics = counted(self.metrics, name, value)

    def count_later(self, seconds, **values):
        """From the next reading on: so much time went by, and series stand at these."""
        metrics = self.metrics
        for name, value in values.items():
            metrics = counted(metrics, name, value)
        self.soon = metrics, self.now + seconds  # in one go: a watcher reads in its own thread

    def answer(self, request):
        self.asked.append(request.url.path)
        if self.down:
            raise httpx.ConnectError("[Errno 111] Connection refused")
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return httpx.Response(401)
        if request.url.path == "/server_info":
            return httpx.Response(200, json=self.info)
        if request.url.path == "/metrics" and self.soon:
            (self.metrics, self.now), self.soon = self.soon, None
        if request.url.path == "/metrics" and self.metrics is not None:
            return httpx.Response(200, text=self.metrics)
        return httpx.Response(404)

    def watcher(self, **options):
        client = httpx.AsyncClient(transport=httpx.MockTransport(self.answer))
        return Watcher(URL, client=client, clock=lambda: self.now, **options)

    def poll(self, watcher, *, after=2.0):
        self.now += after
        asyncio.run(watcher.poll())


def counted(metrics, name, value):
    """The text with another value of a series."""
    head = f"kimi_k3:{name}{{"
    lines = [
        f"{line.rsplit(' ', 1)[0]} {value}" if line.startswith(head) else line
        for line in metrics.splitlines()
    ]
    assert lines != metrics.splitlines() or f" {float(value)}" in metrics
    return "\n".join(lines) + "\n"


@pytest.fixture
def recorded():
    return Recorded()
