"""The status page's document and headers; tests/web looks at it in a browser."""

from __future__ import annotations

import asyncio
import re
import threading
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.routing import Mount

from gemmwire_service.app import create_app
from gemmwire_service.page import policy
from http_calls import call, infer, message
from serving import Served, hold, serving, settings, until


def body(k: int = 128, m: int = 3) -> tuple[bytes, int]:
    return message(torch.ones(m, k, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("path", "links"), [("/", ['href="docs', 'href="metrics']), ("/docs", ['href="openapi.json'])]
)
def test_a_page_needs_nothing_from_elsewhere(server: Served, path: str, links: list[str]) -> None:
    """Guards: a page that is blank on a machine without the internet, or that another site's script is in."""
    reply = call(server, "GET", path)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/html")
    page = reply.body.decode()
    assert re.findall(r"""(?:src|href)="(?!data:)[^"]*""", page) == links
    assert "//" not in re.sub(r"//\s|http://www.w3.org/2000/svg", "", page)
    assert not re.search(r"\son\w+=", page), "an inline event handler, which the policy forbids"
    assert "innerHTML" not in page


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_policy_lets_the_own_script_run_and_no_other(server: Served, path: str) -> None:
    """Guards: a hash of the script as it was, under which the page stays empty."""
    reply = call(server, "GET", path)
    (script,) = re.findall(r"<script>(.*?)</script>", reply.body.decode(), re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy(reply.body.decode())
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_document_has_what_is_served_and_what_was_done(server: Served) -> None:
    before = call(server, "GET", "/status").json
    data, length = body()
    assert infer(server, "m.plain", data, length).status == 200
    assert infer(server, "m.none", data, length).status == 404
    after = call(server, "GET", "/status").json
    plain = next(layer for layer in after["layers"] if layer["name"] == "m.plain")
    assert (plain["n"], plain["k"], plain["backend"], plain["version"]) == (64, 128, "emulation", 1)
    why = after["passed_over"][plain["passed_over"]]
    assert [name for name, _ in why] == [
        "flashinfer_trtllm",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "cublas",
    ]
    assert len(plain["bucket_us"]) == len(after["buckets"])
    assert plain["bucket_us"][after["buckets"].index(3)] > 0
    for code in ("200", "404"):
        assert after["codes"][code] == before["codes"].get(code, 0) + 1
    assert after["recent"][0] | {"at": 0} == {"at": 0, "layer": "", "status": 404, "reason": "layer_unknown"}
    assert (after["state"], after["failure"]) == ("ready", None)


def test_the_times_of_a_bucket_are_of_one_forward(checkpoint: Path) -> None:
    """Guards: a chunked request of nine forwards that makes its bucket nine times as slow."""
    with serving(settings(model=(f"m={checkpoint}",), max_bucket=1)) as served:
        data, length = body(m=9)
        assert infer(served, "m.plain", data, length).status == 200
        document = call(served, "GET", "/status").json
        stages = served.engine.layers["m.plain"].stats.buckets[1]
        plain = next(layer for layer in document["layers"] if layer["name"] == "m.plain")
        assert plain["bucket_us"] == [round(stages.ns / 9000, 1)]


def test_the_queue_is_told_while_it_waits(server: Served) -> None:
    gate = threading.Event()
    hold(server.engine, gate)
    data, length = body()
    thread = threading.Thread(target=infer, args=(server, "m.plain", data, length))
    thread.start()
    try:
        until(lambda: server.engine.waiting == 1, "the request did not come to the queue")
        queue = call(server, "GET", "/status").json["queue"]
        assert (queue["requests"], queue["rows"], queue["bytes"]) == (1, 3, 3 * (128 + 64) * 2)  # of x and y
    finally:
        gate.set()
        thread.join()


def test_the_page_is_there_while_layers_are_loaded(checkpoint: Path) -> None:
    """Guards: a first look that ends in an error."""
    with serving(settings(model=(f"m={checkpoint}",)), wait=False) as served:
        assert call(served, "GET", "/").status == 200
        assert call(served, "GET", "/status").json["state"] in ("loading", "ready")


def test_an_app_that_is_mounted_under_a_prefix_has_its_page_there() -> None:
    """Guards: routes that know only the root."""
    app = Starlette(routes=[Mount("/gemm", app=create_app(settings(random_layer=("try=8x32",))))])

    async def statuses() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
            return [(await client.get(f"/gemm/{path}")).status_code for path in ("", "status", "metrics")]

    assert asyncio.run(statuses()) == [200, 200, 200]
