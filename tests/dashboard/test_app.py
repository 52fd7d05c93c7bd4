"""The web server: one file, its own numbers, nothing secret, no other origin."""

import json
import re

import pytest
from starlette.testclient import TestClient

from sgl_kimi_k3.dashboard.app import app, page

LOCAL = "http://127.0.0.1"


@pytest.fixture
def client(recorded):
    with TestClient(app(recorded.watcher(interval_s=0.2)), base_url=LOCAL) as found:
        yield found


def test_the_page_is_one_file_that_needs_no_other():
    text = page()
    assert "<!-- main.js -->" not in text
    assert text.count("<script>") == text.count("</script>") == 6
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)=(?![\"']data:)", text)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "MIT License" in text  # the chart library's


def test_the_page_is_served_without_permission_to_ask_others(client):
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_the_view_is_what_the_watcher_says(client, recorded):
    found = client.get("/api/view", params={"window": "900"}).json()
    assert found["window_s"] == 900
    assert found["tokens"]["total"]["input"] == recorded.report["tokens"]["input"]
    assert set(found["curves"]) == {"bin_s", "time", "tokens_per_s", "lines"}


@pytest.mark.parametrize("window", ["", "abc", "nan", "9", "3601", "-5", "inf"])
def test_a_bad_window_is_refused(client, window):
    answer = client.get("/api/view", params={"window": window})
    assert answer.status_code == 400
    assert f"window={window}: must be 10 to 3600 seconds" in answer.json()["error"]


def test_the_servers_endpoints_are_passed_on_without_its_secrets(client, recorded):
    assert client.get("/metrics").text == recorded.metrics
    told = client.get("/server_info").json()
    assert told["internal_states"] == [{"kimi_k3": recorded.report}]
    everything = json.dumps([told, client.get("/api/view").json()])
    assert recorded.info["api_key"] == "server-secret"
    assert "server-secret" not in everything


def test_metrics_of_a_server_that_is_away(client, recorded):
    recorded.down = True
    answer = client.get("/metrics")
    assert answer.status_code == 502
    assert "refused" in answer.text


def test_a_foreign_name_is_refused_on_a_loopback_address(client, recorded):
    """A page elsewhere may point its own name at 127.0.0.1."""
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"Host": "localhost:30080"}).status_code == 200
    shared = app(recorded.watcher(), host="0.0.0.0")
    with TestClient(shared, base_url="http://gpu-7.example") as other:
        assert other.get("/").status_code == 200
