"""An ASGI application on a free local port, in a thread; and a browser."""

import contextlib
import os
import shutil
import socket
import threading
import time

import uvicorn
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextlib.contextmanager
def serving(app):
    """Yields the base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the server ended while starting"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)


@contextlib.contextmanager
def chromium():
    """A headless browser: $CHROMIUM, one that is installed, or playwright's own."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        # CI runs as root, where Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def number(text):
    """The number that the page shows, without its grouping and unit."""
    return float(text.replace(",", "").split()[0])
