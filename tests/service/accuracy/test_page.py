"""The report as a page, in a real Chromium, from a file, wide and narrow, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from safetensors.torch import save_file

from chromium import WIDTHS, chromium, colours, page_of
from gemmwire_service.__main__ import main
from gemmwire_service.accuracy.page import page as render
from oracle import spread

pytestmark = pytest.mark.browser

EVIL = "<script>document.title='owned'<\\script><img src=x onerror=document.title='owned'>"
CLOSING = "</script><b>"  # has a slash, which no layer's name may: a note can hold it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    flushed = torch.full((64, 64), 2.0**-24)
    flushed[:, ::32] = 1.0
    tensors = {f"layers.{i}.up": spread(64, 96, seed=i) / 2**14 for i in range(12)}
    tensors |= {"poor": flushed, "zeros": torch.zeros(4, 40), EVIL: torch.ones(8, 32)}
    save_file({f"{name}.weight": each for name, each in tensors.items()}, folder / "model.safetensors")
    save_file({"layers.3.up": torch.ones(3, 96), CLOSING: torch.ones(1, 1)}, folder / "x.safetensors")
    arguments = [folder / "model.safetensors", "--calibrate", folder / "x.safetensors", "--out", folder]
    assert main(["accuracy", *map(str, arguments)]) == 0
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(params=WIDTHS)
def page(browser: Browser, folder: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    with page_of(browser, request.param) as opened:
        opened.goto((folder / "accuracy.html").as_uri())
        yield opened


def row_of(page: Page, layer: str) -> Any:
    return page.locator("#layers .row", has=page.get_by_role("button", name=layer, exact=True))


def test_it_shows_the_numbers_of_the_report(page: Page, folder: Path) -> None:
    found = json.loads((folder / "accuracy.json").read_text())
    expect(page.locator("#layers .row")).to_have_count(len(found["layers"]))
    expect(page.locator("#summary")).to_contain_text(f"{found['summary']['keep']} keep in BF16")
    expect(page.locator("#rule")).to_have_text(found["rule"])
    up = next(layer for layer in found["layers"] if layer["name"] == "layers.3.up")
    row = row_of(page, "layers.3.up")
    expect(row).to_contain_text(f"{up['weight']['sqnr_db']:.1f} dB")
    expect(row).to_contain_text("captured")
    expect(row_of(page, "zeros")).to_contain_text("exact")


def test_a_layer_opens_with_its_charts_and_its_reasons(page: Page) -> None:
    page.get_by_role("button", name="poor", exact=True).click()
    detail = row_of(page, "poor").locator(".detail")
    expect(detail).to_contain_text("share of the weight's elements that become zero")
    for title in ("Block exponents", "Worst rows of x", "Worst output features", "Worst blocks"):
        expect(detail.get_by_role("heading", name=title)).to_be_visible()
    assert detail.locator("svg rect").count() > 8
    assert "NaN" not in page.content().split("<script>")[0]
    page.get_by_role("button", name="poor", exact=True).click()
    expect(detail).to_be_hidden()


def test_every_layer_is_in_the_chart_of_errors(page: Page) -> None:
    circles = page.locator("#errors circle.weight")
    expect(circles).to_have_count(15)
    boxes = page.locator("#errors circle").evaluate_all(
        "nodes => nodes.map(node => [Number(node.getAttribute('cx')), Number(node.getAttribute('cy'))])"
    )
    width = page.locator("#errors svg").evaluate("node => node.viewBox.baseVal.width")
    assert all(0 <= x <= width and 0 <= y <= 220 for x, y in boxes), boxes


def test_layers_are_found_and_sorted(page: Page) -> None:
    page.get_by_label("sort layers by").select_option("verdict")
    expect(page.locator("#layers .name").first).to_have_text("poor")
    page.get_by_label("search layers").fill("keep")
    expect(page.locator("#layers .row")).to_have_count(1)
    page.get_by_label("search layers").fill("nothing")
    expect(page.locator("#none")).to_be_visible()


def test_nothing_is_wider_than_the_screen(page: Page) -> None:
    """Guards: a phone that scrolls sideways."""
    for name in ("poor", "layers.3.up"):
        page.get_by_role("button", name=name, exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_name_is_text_whatever_it_holds(page: Page) -> None:
    """Guards: a checkpoint that runs its own script in the browser of whoever looks at its report."""
    expect(row_of(page, EVIL)).to_be_visible()
    page.get_by_role("button", name=EVIL, exact=True).click()
    expect(page.locator("#notes")).to_contain_text(CLOSING)
    assert page.locator("img, b").count() == 0
    assert page.title().startswith("accuracy of")


def test_it_is_dark_where_that_is_liked(page: Page) -> None:
    assert set(colours(page, "light")).isdisjoint(colours(page, "dark"))


def test_it_asks_for_nothing(browser: Browser, folder: Path) -> None:
    """Guards: a font or a script from elsewhere, which is not there where reports are read."""
    asked: list[str] = []
    with page_of(browser, 1280) as page:
        page.on("request", lambda request: asked.append(request.url))
        page.goto((folder / "accuracy.html").as_uri())
        page.get_by_role("button", name="poor", exact=True).click()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in asked if url.startswith("file:")]) == 1


def test_infinite_errors_are_drawn(browser: Browser, folder: Path, tmp_path: Path) -> None:
    found = json.loads((folder / "accuracy.json").read_text())
    output = found["layers"][0]["outputs"]["gaussian"]
    output["row_error"]["median"] = output["row_error"]["worst"] = "Infinity"
    output["worst_rows"] = [{"row": 5, "relative_error": "Infinity"}, {"row": 1, "relative_error": 0.5}]
    found["layers"][0]["weight"]["sqnr_db"] = "-Infinity"
    (tmp_path / "accuracy.html").write_text(render(found))
    with page_of(browser, 360) as page:
        page.goto((tmp_path / "accuracy.html").as_uri())
        page.get_by_label("sort layers by").select_option("error")
        first = page.locator("#layers .row").first
        expect(first).to_contain_text("infinite")
        first.locator(".name").click()
        expect(first.locator(".detail")).to_contain_text("row 5")
        assert "NaN" not in page.locator("#layers").inner_html()
