"""A real Chromium for the tests of pages, and a page of it that must not complain."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1280, 360)


@contextmanager
def chromium() -> Iterator[Browser]:
    found = next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        # Without its sandbox, which containers and root do not have: the page is our own.
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def page_of(browser: Browser, width: int, **options: Any) -> Iterator[Page]:
    """A page that must not complain: neither the script nor the policy."""
    opened = browser.new_page(viewport={"width": width, "height": 800}, **options)
    opened.set_default_timeout(10_000)
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    opened.close()
    assert complaints == []


def colours(page: Page, scheme: Literal["light", "dark"]) -> tuple[str, str]:
    """Of the page and its text, where the reader likes it so."""
    page.emulate_media(color_scheme=scheme)
    style = "getComputedStyle(document.body)"
    return page.evaluate(f"{style}.backgroundColor"), page.evaluate(f"{style}.color")
