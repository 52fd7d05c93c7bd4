"""The page in a browser, against the recorded server: figures, themes, sizes, states."""

import re

import pytest
from playwright.sync_api import expect

from sgl_kimi_k3.dashboard.app import app
from tests.dashboard.conftest import Recorded
from tests.dashboard.serving import chromium, number, serving

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server():
    """One recorded server and its dashboard; every test sets what it needs."""
    told = Recorded()
    watcher = told.watcher(interval_s=0.2)
    with serving(app(watcher)) as url:
        told.url = url
        yield told


@pytest.fixture
def told(server):
    """The server, as recorded, with time going by."""
    fresh = Recorded()
    server.__dict__.update({**fresh.__dict__, "url": server.url, "now": server.now})
    return server


@pytest.fixture
def visit(browser, told):
    """Opens the page; at the end, nothing may have been written to the console."""
    contexts, said = [], []

    def go(size=DESKTOP, scheme="light", *, ready=True):
        context = browser.new_context(viewport=size, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url)
                if not request.url.startswith((told.url, "data:")) else None)  # fmt: skip
        page.goto(told.url)
        if ready:
            expect(page.locator("#main")).to_be_visible()
            expect(page.locator("#live")).to_have_text("Live")
        return page

    yield go
    for context in contexts:
        context.close()
    assert said == []


def cell(page, table, key, column):
    return page.locator(f"#{table} tr[data-key='{key}'] :is(th, td)").nth(column)


def test_the_figures_are_the_servers(visit, told):
    page, tokens = visit(), told.report["tokens"]
    expect(cell(page, "reasons", "input", 3)).to_have_text(f"{tokens['input']:,}")
    expect(cell(page, "reasons", "resumed", 3)).to_have_text(f"{tokens['resumed']:,}")
    for reason, count in tokens["lost"].items():
        expect(cell(page, "reasons", reason, 3)).to_have_text(f"{count:,}")
    rate = f"{100 * tokens['resumed'] / tokens['input']:.1f} %"
    expect(page.locator("#tile-hit .sub")).to_have_text(f"{rate} since start")
    checkpoints = told.report["checkpoints"]
    for kind, held in checkpoints["held"].items():
        assert number(cell(page, "checkpoints", kind, 1).inner_text()) == held
        assert number(cell(page, "checkpoints", kind, 2).inner_text()) == checkpoints["taken"][kind]
        assert number(cell(page, "checkpoints", kind, 5).inner_text()) == told.report["hits"][kind]
    sizes = page.locator("#arena [data-bytes]").evaluate_all(
        "cells => cells.map(cell => Number(cell.dataset.bytes))"
    )
    assert sum(sizes) == told.report["arena"]["total_bytes"]


def test_the_figures_follow_the_server(visit, told):
    page = visit()
    told.count_later(4, input_tokens_total=33406, resumed_tokens_total=27867)
    expect(cell(page, "reasons", "input", 1)).to_have_text("1,000")
    expect(page.locator("#tile-hit .value")).to_have_text("90.0%")
    expect(page).to_have_title(re.compile("^90.0 %"))


def test_requests_are_explained(visit, told):
    page = visit()
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(len(told.report["requests"]))
    newest = told.report["requests"][-1]
    expect(rows.first).to_contain_text(f"{newest['resumed']:,} of {newest['prompt_tokens']:,} tok")
    told.report["explain"] = False
    expect(page.locator("#requests-note")).to_contain_text("KIMI_K3_EXPLAIN=1")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, {"width": 900, "height": 700}, PHONE])
def test_it_fits_every_screen_in_both_themes(visit, size, scheme):
    page = visit(size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
    boxes = page.locator("main > section:visible").evaluate_all(
        "all => all.map(one => { const b = one.getBoundingClientRect(); return [b.left, b.right] })"
    )
    assert len(boxes) == 11
    assert all(0 <= left < right <= size["width"] for left, right in boxes)
    clipped = page.locator("main section.panel").evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"
    )
    assert clipped == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in re.findall(r"\d+", background)[:3]]
    assert (sum(channels) > 600) == (scheme == "light")


def test_text_can_be_read_in_both_themes(visit):
    """WCAG AA: 4.5 to 1 for text on its panel."""
    for scheme in ("light", "dark"):
        page = visit(DESKTOP, scheme)
        panel = page.locator(".panel").first.evaluate("e => getComputedStyle(e).backgroundColor")
        for selector in ("h2", "small", ".tile .label", ".tile.lead .value", "td.zero"):
            text = page.locator(selector).first.evaluate("e => getComputedStyle(e).color")
            assert contrast(text, panel) >= 4.5, (scheme, selector, text, panel)


def contrast(one, other):
    def light(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_theme_is_switched_and_remembered(visit):
    page = visit(DESKTOP, "light")
    page.get_by_role("button", name="Switch between light and dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_another_time_is_chosen_by_keyboard(visit):
    page = visit()
    page.get_by_role("radio", name="5 min", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#reasons-window")).to_have_text("In 15 min")


def test_a_term_is_explained_to_mouse_and_keyboard(visit):
    page = visit()
    term = page.locator("#checkpoints .term", has_text="Junction")
    for show in (term.hover, term.focus):
        show()
        expect(page.get_by_role("tooltip")).to_contain_text("the prefix that they share")
        page.keyboard.press("Escape")
        expect(page.get_by_role("tooltip", include_hidden=True)).to_be_hidden()


def test_a_server_that_goes_away(visit, told):
    page = visit()
    told.down = True
    banner = page.get_by_role("status")
    expect(banner).to_contain_text(
        "Server not reachable at http://127.0.0.1:30000: connection refused. Retrying every 0.2 s"
    )
    expect(page.locator("#live")).to_have_text("Disconnected")
    expect(page.locator("#main")).to_have_class("stale")
    told.down = False
    expect(page.locator("#live")).to_have_text("Live")
    expect(banner).to_be_empty()


def test_a_server_with_another_cache_shows_what_it_has(visit, told):
    told.info.update(radix_cache_backend=None, internal_states=[{}])
    page = visit()
    expect(page.get_by_role("status")).to_contain_text("does not run the kimi_k3 backend")
    expect(page.locator("#arena")).to_be_hidden()
    expect(page.locator("#ttft-chart")).to_be_visible()


def test_a_server_that_never_answered(browser):
    told = Recorded()
    told.down = True
    with serving(app(told.watcher(interval_s=0.2))) as url:
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#empty")).to_contain_text("http://127.0.0.1:30000")
        expect(page.get_by_role("status")).to_contain_text("Server not reachable")
        expect(page.locator("#main")).to_be_hidden()
        page.close()
