"""Dashboard and `top` against a served K3: what they show is what `/metrics` says."""

import json

import pytest
from playwright.sync_api import expect

from sgl_kimi_k3 import cli
from sgl_kimi_k3.dashboard.app import app
from sgl_kimi_k3.dashboard.watcher import Watcher
from tests.dashboard.serving import chromium, number, serving
from tests.e2e.prompts import words

pytestmark = pytest.mark.e2e


def served_turns(server):
    """Two turns of a chat and a stranger: something resumed, diverged and new."""
    prompt = words("dashboard", 70)
    first = server.generate(prompt, 8)
    server.generate([*prompt, *first.ids, *words("dashboard 2", 20)], 8)
    server.generate(words("dashboard stranger", 33), 4)


def shown(page, table, key, column):
    cell = page.locator(f"#{table} tr[data-key='{key}'] :is(th, td)").nth(column)
    return number(cell.inner_text())


def test_the_page_shows_what_metrics_say(roomy):
    watcher = Watcher(roomy.base_url, interval_s=0.5)
    with serving(app(watcher)) as url, chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        expect(page.locator("#live")).to_have_text("Live")
        before = roomy.metrics()
        served_turns(roomy)
        told = roomy.settle()
        total = f"{told['kimi_k3:input_tokens_total']:,.0f}"
        row = page.locator("#reasons tr[data-key='input']")
        expect(row).to_contain_text(total, timeout=30_000)
        # The counters have been read by then; gauges and /server_info come with the next reading.
        page.wait_for_timeout(2000)
        assert shown(page, "reasons", "resumed", 3) == told["kimi_k3:resumed_tokens_total"]
        reasons = [key for key in told if key.startswith("kimi_k3:lost_tokens_total{")]
        assert len(reasons) >= 5
        for key in reasons:
            assert shown(page, "reasons", key.split('"')[1], 3) == told[key], key
        grown = told.since(before, "kimi_k3:input_tokens_total")
        assert grown == 70 + 70 + 8 + 20 + 33
        assert shown(page, "reasons", "input", 1) >= grown
        for kind in ("prompt_end", "turn_end", "interval", "opportunistic"):
            taken = told[f'kimi_k3:checkpoints_taken_total{{kind="{kind}"}}']
            resumed = told[f'kimi_k3:hit_tokens_total{{kind="{kind}"}}']
            assert shown(page, "checkpoints", kind, 2) == taken
            assert shown(page, "checkpoints", kind, 5) == resumed
        assert (
            sum(shown(page, "checkpoints", kind, 1) for kind in kinds(page))
            == (told["kimi_k3:cached_states"])
        )
        sizes = dict(page.locator("#arena [data-bytes]").evaluate_all(
            "cells => cells.map(cell => [cell.dataset.part, Number(cell.dataset.bytes)])"
        ))  # fmt: skip
        assert sum(sizes.values()) == roomy.arena_bytes()
        drawn = {"states": ("states_used", "states_cached"), "kv": ("kv_used", "kv_cached")}
        for part in ("states", "kv", "gap", "sink"):
            pieces = drawn.get(part, (part,))
            expected = told[f'kimi_k3:arena_bytes{{part="{part}"}}']
            assert sum(sizes[piece] for piece in pieces) == expected, part
        assert said == []


def kinds(page):
    return page.locator("#checkpoints tbody tr").evaluate_all(
        "rows => rows.map(row => row.dataset.key)"
    )


def test_top_tells_the_same_to_scripts(roomy, capsys):
    served_turns(roomy)
    told = roomy.settle()
    assert cli.main(["top", "--server", roomy.base_url, "--once", "--json", "--interval", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = found["tokens"]["total"]
    assert tokens["input"] == told["kimi_k3:input_tokens_total"]
    assert tokens["resumed"] == told["kimi_k3:resumed_tokens_total"]
    assert tokens["resumed"] + sum(tokens["lost"].values()) == tokens["input"]
    assert sum(found["checkpoints"]["held"].values()) == told["kimi_k3:cached_states"]
    assert sum(found["arena"]["bytes"].values()) == roomy.arena_bytes()
    assert found["hit_rate"]["window"] is None  # nothing was served between the two readings
    assert found["load"]["running"] == 0
