"""`python -m tests.dashboard.picture URL FILE [--dark] [--phone]`: the page at URL as a picture.

docs/dashboard.png is the page of a `sgl-kimi-k3 dashboard` beside a `quickstart.sh --keep`, under
a minute of streamed conversations: continued, edited, and about documents of their own.
"""

import argparse

from playwright.sync_api import expect

from tests.dashboard.serving import chromium

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True}
DESK = {"viewport": {"width": 1440, "height": 900}}


def take(url: str, file: str, *, dark: bool, phone: bool) -> None:
    """The whole page, its last minute."""
    shown = PHONE if phone else DESK
    with chromium() as browser:
        page = browser.new_page(**shown, color_scheme="dark" if dark else "light")
        page.goto(url)
        expect(page.locator("#live")).to_have_text("Live", timeout=30_000)
        page.get_by_text("1 min", exact=True).click()
        page.wait_for_timeout(3000)
        page.screenshot(path=file, full_page=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("file")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    given = parser.parse_args()
    take(given.url, given.file, dark=given.dark, phone=given.phone)
