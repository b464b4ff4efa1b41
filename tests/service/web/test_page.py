"""The status page in a real Chromium, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import torch
from playwright.sync_api import Browser, Page, Route, expect
from safetensors.torch import save_file

from chromium import WIDTHS, chromium, colours, page_of
from gemmwire import Client
from http_calls import infer, message
from keyed import drawn
from oracle import spread
from serving import Served, serving, settings

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror=document.title='owned'>"
SHAPES = {"model.layers.2.up": (64, 128), "model.layers.10.up": (96, 128), EVIL: (64, 128)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("page") / "model.safetensors"
    save_file({f"{name}.weight": spread(n, k, seed=n + k) / 2**14 for name, (n, k) in SHAPES.items()}, path)
    with serving(settings(model=(f"m={path}",))) as running:
        yield running


@pytest.fixture(params=WIDTHS)
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    with page_of(browser, request.param) as opened:
        yield opened


def name_of(page: Page, layer: str) -> Any:
    return page.get_by_role("button", name=layer, exact=True)


def ask(served: Served, layer: str, m: int) -> int:
    body, length = message(torch.ones(m, 128, dtype=torch.bfloat16))
    return infer(served, quote(layer), body, length).status


def test_a_layer_shows_what_it_is_and_why_it_is_not_faster(served: Served, page: Page) -> None:
    page.goto(served.url)
    expect(page.locator("#state")).to_have_text("ready")
    row = page.locator(".row", has=name_of(page, "m.model.layers.2.up"))
    expect(row).to_contain_text("64 x 128")
    expect(row).to_contain_text("emulation")
    expect(row.locator(".why")).to_contain_text("flashinfer_trtllm: needs an NVIDIA GPU")
    name_of(page, "m.model.layers.2.up").click()
    for part in ("not cublas", "quantization error", "model.safetensors", "1 to 4096"):
        expect(row.locator(".detail")).to_contain_text(part)


def test_a_layer_shows_what_quantizing_cost_its_weight(served: Served, page: Page) -> None:
    page.goto(served.url)
    name_of(page, "m.model.layers.2.up").click()
    row = page.locator(".row", has=name_of(page, "m.model.layers.2.up"))
    for part in ("weight SQNR", " dB", "flushed to zero", "saturated", "subnormal"):
        expect(row.locator(".detail")).to_contain_text(part)
    page.get_by_label("sort layers by").select_option("loss")
    expect(page.locator("#layers .row")).to_have_count(len(SHAPES))


def test_figures_of_a_weight_that_was_replaced_do_not_stay(served: Served, page: Page) -> None:
    """Guards: the figures of the weight before under the version that is served, on a page that is open."""
    name, weight = "m.model.layers.10.up", spread(96, 128, seed=96 + 128) / 2**14
    page.goto(served.url)
    name_of(page, name).click()
    detail = page.locator(".row", has=name_of(page, name)).locator(".detail")
    expect(detail).to_contain_text(re.compile(r"\d\.\d dB"))
    with Client(served.url) as client:
        version = client.refit(name, torch.ones(96, 128)).version
        expect(detail).to_contain_text("weight SQNRexact")
        expect(detail).to_contain_text(f"version{version}")
        codes = torch.ones(96, 128).to(torch.float8_e4m3fn)
        client.refit(name, codes, scale=torch.full((96, 4), 127, dtype=torch.uint8))
        expect(detail).not_to_contain_text("weight SQNR")
        client.refit(name, weight)  # for the tests that follow


def test_nothing_is_wider_than_the_screen(served: Served, page: Page) -> None:
    """Guards: a phone that scrolls sideways."""
    page.goto(served.url)
    name_of(page, "m.model.layers.2.up").click()
    expect(page.locator(".detail dl")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_name_is_text_whatever_it_holds(served: Served, page: Page) -> None:
    """Guards: a checkpoint that runs its own script in the operator's browser."""
    assert ask(served, f"m.{EVIL}", 1) == 200
    body, length = message(torch.ones(1, 5, dtype=torch.bfloat16))
    assert infer(served, quote(f"m.{EVIL}"), body, length).status == 400  # among the refusals too
    page.goto(served.url)
    name_of(page, f"m.{EVIL}").click()
    expect(page.locator(".detail dl")).to_contain_text("emulation on cpu")
    expect(page.locator("#recent")).to_contain_text(EVIL)
    assert page.locator("img").count() == 0
    assert page.title() == "gemmwire"


def test_numbers_arrive_while_it_is_looked_at(served: Served, page: Page) -> None:
    page.goto(served.url)
    row = page.locator(".row", has=name_of(page, "m.model.layers.10.up"))
    expect(row).to_be_visible()
    before = int(row.locator(".count").text_content() or 0)
    for _ in range(3):
        assert ask(served, "m.model.layers.10.up", 7) == 200
    expect(row.locator(".count")).to_have_text(str(before + 3))
    expect(row.locator(".strip .cell[title^='M = 8: ']")).not_to_have_text("")
    expect(page.locator("#requests-s")).not_to_have_text("-")
    expect(page.locator("#p50")).to_contain_text("s")
    assert page.locator("#chart-requests path").get_attribute("d")


def many(route: Route) -> None:
    """The document of a server of 300 layers."""
    document = route.fetch().json()
    layer = document["layers"][0]
    document["layers"] = [
        layer | {"name": f"model.layers.{i}.up", "n": 64 * (1 + i % 7), "codes": {"200": i, "400": i % 3}}
        for i in range(300)
    ]
    route.fulfill(json=document)


def test_one_of_hundreds_is_found(served: Served, page: Page) -> None:
    page.route("**/status", many)
    page.goto(served.url)
    expect(page.locator("#layers .row")).to_have_count(300)
    page.get_by_label("search layers").fill("layers.29")
    expect(page.locator("#layers .row")).to_have_count(11)
    expect(page.locator("#shown")).to_have_text("11 of 300")
    page.get_by_label("search layers").fill("448x128")
    expect(page.locator("#layers .row")).to_have_count(42)
    page.get_by_label("search layers").fill("")
    names = page.locator("#layers .name")
    page.get_by_label("sort layers by").select_option("name")
    expect(names.nth(2)).to_have_text("model.layers.2.up")
    page.get_by_label("sort layers by").select_option("requests")
    expect(names.nth(0)).to_have_text("model.layers.299.up")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("path", ["/some/prefix/", "/some/prefix"])
def test_it_works_behind_a_prefix(served: Served, page: Page, path: str) -> None:
    """Guards: a page that asks the root of a proxy, which is another service's."""
    asked: list[str] = []

    def proxy(route: Route) -> None:
        there = urlsplit(route.request.url).path
        asked.append(there)
        if there != "/some/prefix" and not there.startswith("/some/prefix/"):
            return route.fulfill(status=502)
        return route.fulfill(
            response=route.fetch(url=served.url + (there.removeprefix("/some/prefix") or "/"))
        )

    page.route("**/*", proxy)
    page.goto(served.url + path)
    name_of(page, "m.model.layers.2.up").click()
    expect(page.locator(".detail dl")).to_contain_text("emulation on cpu")
    assert all(each.startswith("/some/prefix") for each in asked)
    assert urlsplit(page.locator("#to-docs").evaluate("node => node.href")).path == "/some/prefix/docs"


def test_the_routes_are_listed_with_their_forms(served: Served, page: Page) -> None:
    """Guards: a list of routes that is empty, or that opens nothing."""
    page.goto(served.url + "/docs")
    page.locator("summary", has_text="PUT /v2/repository/models/{layer}/weights").click()
    page.locator("summary").get_by_text("/v2/models/{layer}/infer", exact=False).first.click()
    page.locator("a:visible", has_text="InferRequestForm").click()
    expect(page.locator("#InferRequestForm[open] table")).to_contain_text("inputs")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_is_dark_where_that_is_liked(served: Served, page: Page) -> None:
    page.goto(served.url)
    assert set(colours(page, "light")).isdisjoint(colours(page, "dark"))


def test_a_key_that_the_browser_asks_for_opens_it(checkpoint: Path, browser: Browser, tmp_path: Path) -> None:
    """Guards: a page that shows itself and then may not ask for its numbers."""
    keys = drawn(tmp_path)
    with serving(settings(model=(f"m={checkpoint}",), key_file=str(keys.path))) as served:
        context = browser.new_context(http_credentials={"username": "me", "password": keys.infer})
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.goto(served.url)
        name_of(page, "m.plain").click()
        expect(page.locator(".detail dl")).to_contain_text("emulation on cpu")
        context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_server_that_is_gone_is_said_so(checkpoint: Path, browser: Browser, width: int) -> None:
    """Guards: old numbers that look alive."""
    page = browser.new_page(viewport={"width": width, "height": 800})  # its console has the failures
    with serving(settings(model=(f"m={checkpoint}",))) as served:
        page.goto(served.url)
        expect(page.locator("#state")).to_have_text("ready")
    expect(page.get_by_role("alert")).to_contain_text("No numbers from the server")
    expect(page.locator("#state")).to_have_text("no answer")
    page.close()
