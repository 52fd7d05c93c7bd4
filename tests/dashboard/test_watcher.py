"""How a server stands: unreachable, asking for a key, without metrics, without this backend."""

import asyncio

import httpx
import pytest

from sgl_kimi_k3.dashboard.watcher import Watcher, server_url

COUNTED = "kimi_k3:input_tokens_total"


def test_a_server_that_answers(recorded):
    watcher = recorded.watcher()
    assert watcher.status.state == "waiting"
    recorded.poll(watcher)
    status = watcher.summary(60)["status"]
    assert (status["state"], status["cache"], status["message"]) == ("ok", "on", "")
    assert status["heard_at"] == recorded.now
    assert watcher.summary(60)["server"] == {
        "url": "http://127.0.0.1:30000", "model": "/models/small-k3", "version": "0.5.23",
    }  # fmt: skip


def test_a_server_that_goes_away_and_comes_back_restarted(recorded):
    watcher = recorded.watcher()
    recorded.poll(watcher)
    heard = recorded.now
    recorded.down = True
    recorded.poll(watcher, after=60)
    status = watcher.status
    assert status.state == "unreachable"
    assert status.message == "Server not reachable at http://127.0.0.1:30000: connection refused."
    assert status.heard_at == heard
    assert watcher.summary(60)["tokens"]["total"]["input"] == 32406  # the last that is known
    recorded.down = False
    recorded.count("input_tokens_total", 100)
    recorded.poll(watcher)
    assert watcher.status.state == "ok"
    assert watcher.status.message == ""
    found = watcher.summary(600)
    assert found["restarts_seen"] == 1
    assert found["tokens"]["window"]["input"] == 100


def test_a_key_is_asked_for_and_sent(recorded):
    recorded.key = "open sesame"
    without = recorded.watcher()
    recorded.poll(without)
    assert without.status.state == "denied"
    assert "--api-key" in without.status.message
    with_key = recorded.watcher(api_key="open sesame")
    recorded.poll(with_key)
    assert with_key.status.state == "ok"
    assert "open sesame" not in str(with_key.summary(60))


def test_without_metrics_the_report_is_enough(recorded):
    recorded.metrics = None
    watcher = recorded.watcher()
    recorded.poll(watcher)
    recorded.report["tokens"]["input"] += 50
    recorded.poll(watcher)
    found = watcher.summary(60)
    assert found["status"]["metrics"] is False
    assert found["tokens"]["window"]["input"] == 50
    assert found["arena"]["bytes"]["states"] > 0
    assert found["load"]["running"] is None
    assert found["load"]["output_tokens_per_s"] is None


@pytest.mark.parametrize(
    ("change", "cache", "word"),
    [
        ({"radix_cache_backend": None}, "other", "does not run the kimi_k3 backend"),
        ({"disable_radix_cache": True}, "off", "--disable-radix-cache"),
    ],
)
def test_a_server_without_this_cache(recorded, change, cache, word):
    recorded.info.update(change)
    recorded.info["internal_states"] = [{}]
    watcher = recorded.watcher()
    recorded.poll(watcher)
    found = watcher.summary(60)
    assert found["status"]["cache"] == cache
    assert word in found["status"]["message"]
    assert found["arena"]["ranks"] == []


@pytest.mark.parametrize("body", ["[]", "{}", "<html>"])
def test_something_else_that_answers(recorded, body):
    recorded.answer = lambda _: httpx.Response(200, text=body)
    watcher = recorded.watcher()
    recorded.poll(watcher)
    assert watcher.status.state == "unknown"
    assert "not like an SGLang server" in watcher.status.message


def test_a_busy_scheduler_does_not_hold_up_the_metrics(recorded):
    """`/server_info` waits for the scheduler's next step, which may be a prefill of seconds."""

    async def scenario():
        released = asyncio.Event()

        async def answer(request):
            if request.url.path == "/server_info" and recorded.asked:
                await released.wait()
            return recorded.answer(request)

        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        watcher = Watcher(
            "127.0.0.1:30000", interval_s=0.01, client=client, clock=lambda: recorded.now
        )
        await watcher.poll()
        for _ in range(3):
            recorded.now += 2
            await watcher.poll()
        assert watcher.history.covered(0, recorded.now) == 6
        assert watcher.status.state == "ok"
        released.set()
        await watcher.poll()
        assert recorded.asked.count("/server_info") == 2  # never two at once
        await watcher.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", "ftp://host:1", "http://", "host:port", "http://h:99999"])
def test_what_is_no_url_is_refused(text):
    with pytest.raises(ValueError, match=r"--server .*: must be a URL such as http://"):
        server_url(text)
