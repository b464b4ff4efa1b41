"""Clients that leave, wait too long, or ask for too much at once, over a real socket."""

from __future__ import annotations

import gc
import socket
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gemmwire_service.backlog import Item
from http_calls import HEADER_LENGTH, infer, message
from links import held
from serving import Served, serving, settings, until

X = torch.ones(1, 128)


@pytest.fixture(params=(True, False), ids=("fast-path", "asgi"))
def small(checkpoint: object, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(settings(model=(f"m={checkpoint}",), max_queue=2, fast_path=request.param)) as served:
        yield served


def request_bytes(layer: str = "m.plain") -> bytes:
    body, length = message(X)
    head = (
        f"POST /v2/models/{layer}/infer HTTP/1.1\r\nHost: x\r\n{HEADER_LENGTH}: {length}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_a_client_that_leaves_while_it_waits_is_never_computed(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: list[Item] = []
    submit = small.engine.submit

    def noting(*arguments: Any) -> Item:
        items.append(submit(*arguments))
        return items[-1]

    monkeypatch.setattr(small.engine, "submit", noting)
    stats = small.engine.layers["m.plain"].stats
    with held(small):
        link = socket.create_connection(("127.0.0.1", small.port))
        link.sendall(request_bytes())
        until(lambda: items, "the request did not arrive")
        executions = stats.executions
        link.close()
        until(lambda: items[0].left, "the server did not notice the client leaving")
    until(lambda: small.engine.waiting == 0, "the request kept its place")
    assert stats.executions == executions
    assert infer(small, "m.plain", *message(X)).status == 200


def test_a_client_that_leaves_in_the_middle_of_its_body_costs_nothing(small: Served) -> None:
    for cut in (30, 200, len(request_bytes()) - 1):
        link = socket.create_connection(("127.0.0.1", small.port))
        link.sendall(request_bytes()[:cut])
        link.close()
    assert infer(small, "m.plain", *message(X)).status == 200
    assert small.engine.waiting == 0


def test_a_full_queue_is_503_with_retry_after_and_loses_nobody(small: Served) -> None:
    with ThreadPoolExecutor(3) as pool:
        with held(small):
            waiting = [pool.submit(infer, small, "m.plain", *message(X)) for _ in range(2)]
            until(lambda: small.engine.waiting == 2, "the requests did not arrive")
            refused = infer(small, "m.plain", *message(X))
            assert (refused.status, refused.json["code"]) == (503, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        assert [reply.result().status for reply in waiting] == [200, 200]


@pytest.mark.parametrize("where", ["parameter", "header"])
def test_a_deadline_that_passes_is_504_while_the_device_is_busy(small: Served, where: str) -> None:
    body, length = message(X, parameters={"timeout": 20_000} if where == "parameter" else {})
    headers = {"gemmwire-timeout-us": "20000"} if where == "header" else {}
    executions = small.engine.layers["m.plain"].stats.executions
    with held(small):
        reply = infer(small, "m.plain", body, length, **headers)
        assert (reply.status, reply.json["code"]) == (504, "deadline_exceeded")
    until(lambda: small.engine.waiting == 0, "the request kept its place")
    assert small.engine.layers["m.plain"].stats.executions == executions


def test_pipelined_requests_on_one_connection_are_answered_in_order(small: Served) -> None:
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as link:
        link.sendall(request_bytes() + request_bytes("nowhere") + request_bytes())
        received = b""
        while received.count(b"HTTP/1.1 ") < 3:
            received += link.recv(65536)
    statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404", b"200"]


def test_an_answer_that_took_long_is_freed_with_its_request(
    small: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a cycle of request and watcher, which keeps each answer until the collector comes."""
    refs: list[Any] = []
    submit = small.engine.submit

    def noting(*arguments: Any) -> Item:
        item = submit(*arguments)
        refs.append(weakref.ref(item))
        return item

    monkeypatch.setattr(small.engine, "submit", noting)
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(1) as pool:
            with held(small):
                reply = pool.submit(infer, small, "m.plain", *message(X))
                time.sleep(0.1)  # longer than it takes to start watching
            assert reply.result().status == 200
        until(lambda: refs[0]() is None, "the request is still in memory", 5)
    finally:
        gc.enable()
