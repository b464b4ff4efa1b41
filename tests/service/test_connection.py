"""Infer from the socket, past ASGI: what it takes, what it leaves, and that nobody can tell which."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from gemmwire_service.connection import Connection
from gemmwire_service.exchange import Exchange
from gemmwire_service.head import parse_head
from http_calls import HEADER_LENGTH, call, infer, message
from links import GOOD, REQUESTS, X, answers, held, linked, request, statuses, steady
from serving import Served, hold, serving, settings, until


def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers of the requests that this path takes from here on."""
    layers: list[str] = []
    real = Connection._begin

    def noting(self: Connection, exchange: Exchange, data: memoryview) -> None:
        layers.append(exchange.layer.name)
        real(self, exchange, data)

    monkeypatch.setattr(Connection, "_begin", noting)
    return layers


@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS)
def test_both_paths_give_the_same_answer_byte_for_byte(fast: Served, asgi: Served, sent: bytes) -> None:
    got = []
    for served in (fast, asgi):
        with linked(served) as link:
            link.sendall(sent)
            got.append(steady(answers(link, 1)[0]))
    assert got[0] == got[1]


@pytest.mark.parametrize(
    ("name", "path"),
    [("binary", True), ("json", True), ("close", True), ("wrong-k", True), ("unknown-layer", False)]
    + [(name, False) for name in ("http-1.0", "chunked", "query", "escaped", "two-lengths", "folded")],
)
def test_which_requests_this_path_takes(
    fast: Served, monkeypatch: pytest.MonkeyPatch, name: str, path: bool
) -> None:
    layers = taken(monkeypatch)
    with linked(fast) as link:
        link.sendall(REQUESTS[name])
        answers(link, 1)
    assert bool(layers) is path


@pytest.mark.parametrize("cut", range(1, len(GOOD), 37))
def test_a_request_may_come_in_pieces_cut_anywhere(fast: Served, cut: int) -> None:
    with linked(fast) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            link.sendall(GOOD[:cut])
            time.sleep(0.002)
            link.sendall(GOOD[cut:])
            assert statuses(answers(link, 1)) == [200]


def test_a_request_may_come_byte_by_byte(fast: Served) -> None:
    with linked(fast) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in GOOD:
            link.sendall(bytes([byte]))
        assert statuses(answers(link, 1)) == [200]


def test_pipelined_requests_of_both_kinds_are_answered_in_order(fast: Served) -> None:
    metadata = b"GET /v2/models/m.plain HTTP/1.1\r\nHost: x\r\n\r\n"
    sent = [GOOD, metadata, GOOD, GOOD, REQUESTS["unknown-layer"], REQUESTS["chunked"], GOOD, metadata]
    with linked(fast) as link:
        for _ in range(3):
            link.sendall(b"".join(sent))
            found = answers(link, len(sent))
            assert statuses(found) == [200, 200, 200, 200, 404, 200, 200, 200]
            assert [b"model_version" in answer for answer in found] == [
                one in (GOOD, REQUESTS["chunked"]) for one in sent
            ]


def test_a_thousand_pipelined_requests_are_each_answered(fast: Served) -> None:
    with linked(fast) as link, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(link.sendall, GOOD * 1000)
        assert statuses(answers(link, 1000)) == [200] * 1000
        sending.result()
    assert fast.engine.waiting == 0


def test_what_comes_while_the_device_works_waits_for_its_turn(fast: Served) -> None:
    with linked(fast) as link:
        with held(fast):
            link.sendall(GOOD)
            until(lambda: fast.engine.waiting == 1, "the request did not arrive")
            link.sendall(GOOD + b"GET /v2/health/live HTTP/1.1\r\n\r\n")
            time.sleep(0.05)
            assert fast.engine.waiting == 1, "one connection has one request under way"
        assert statuses(answers(link, 3)) == [200] * 3


def test_a_client_that_reads_no_answers_is_read_no_further(fast: Served) -> None:
    """Guards: a pipelining client that makes the server hold any number of answers."""
    sent = request(*message(torch.ones(20, 32)), path="/v2/models/tall/infer")  # answers of 16 MB
    layer = fast.engine.layers["tall"]
    before = layer.stats.success.count
    with linked(fast) as link, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(link.sendall, sent * 8)
        until(lambda: layer.stats.success.count > before, "nothing was answered")
        time.sleep(0.3)
        assert layer.stats.success.count - before <= 2
        assert statuses(answers(link, 8)) == [200] * 8
        sending.result()


@pytest.mark.parametrize("cut", [len(GOOD) - 1, len(GOOD) - 500])
def test_a_client_that_leaves_in_mid_body_leaves_nothing_behind(fast: Served, cut: int) -> None:
    with linked(fast) as link:
        link.sendall(GOOD[:cut])
        until(lambda: fast.lane.begun == 1, "the request was not begun")
    until(lambda: fast.lane.begun == 0, "the request is still under way")
    assert infer(fast, "m.plain", *message(X)).status == 200


def test_requests_that_wait_are_in_flight_until_they_are_answered(fast: Served) -> None:
    with linked(fast) as one, linked(fast) as two:
        with held(fast):
            one.sendall(GOOD)
            two.sendall(GOOD)
            until(lambda: fast.lane.begun == 2, "they were not begun")
        answers(one, 1)
        answers(two, 1)
    assert fast.lane.begun == 0


def test_a_fault_of_ours_is_one_requests_500(fast: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    with linked(fast) as link:
        for step in ("call", "reply"):
            with monkeypatch.context() as patch:
                patch.setattr("gemmwire_service.infer.Infer." + step, broken)
                link.sendall(GOOD)
                answer = answers(link, 1)[0]
            assert statuses([answer]) == [500]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "internal"
            link.sendall(GOOD)
            assert statuses(answers(link, 1)) == [200]
    assert fast.lane.begun == 0


def test_an_answer_that_comes_after_a_fault_is_not_the_next_requests(
    fast: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: the rows of a request that was told 500 in the answer to the next one."""
    real = fast.engine.submit

    def broken(*arguments: Any) -> None:
        real(*arguments)
        raise RuntimeError("a fault")

    other = request(*message(X + 1))
    with linked(fast) as link:
        link.sendall(other)
        expected = answers(link, 1)[0]
        with held(fast):
            with monkeypatch.context() as patch:
                patch.setattr(fast.engine, "submit", broken)
                link.sendall(GOOD)
                assert statuses(answers(link, 1)) == [500]
            link.sendall(other)
            until(lambda: fast.engine.waiting == 2, "the request did not arrive")
        assert answers(link, 1)[0].endswith(expected[-3 * 64 * 4 :])


def test_what_cannot_be_sent_to_one_client_ends_that_one(
    fast: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: the other answers of a batch lost with the one that could not be written."""
    real = Connection._message
    made: list[bytes] = []

    def first_broken(self: Connection, *arguments: Any) -> list[Any]:
        whole = real(self, *arguments)
        made.append(b"")
        return ["no bytes"] if len(made) == 1 else whole

    with linked(fast) as one, linked(fast) as two:
        with held(fast):
            one.sendall(GOOD)
            until(lambda: fast.engine.waiting == 1, "the request did not arrive")
            two.sendall(GOOD)
            until(lambda: fast.engine.waiting == 2, "the request did not arrive")
            monkeypatch.setattr(Connection, "_message", first_broken)
        assert statuses(answers(two, 1)) == [200]
        with suppress(ConnectionResetError):
            assert one.recv(1) == b""
    assert "could not be sent" in caplog.text


def test_a_stopping_server_answers_what_is_under_way_and_closes(checkpoint: object) -> None:
    with (
        serving(settings(model=(f"m={checkpoint}",))) as served,
        linked(served) as idle,
        linked(served) as link,
    ):
        gate = threading.Event()
        hold(served.engine, gate)
        link.sendall(GOOD)
        until(lambda: served.engine.waiting == 1, "the request did not arrive")
        served.stop()
        assert idle.recv(1) == b""
        gate.set()
        answer = answers(link, 1)[0]
        assert statuses([answer]) == [200]
        assert b"connection: close" in answer
        assert link.recv(1) == b""


def offering(sent: bytes) -> bytes:
    """The request, which HTTP/2 may answer too."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    return sent.replace(b"Host: x\r\n", offer, 1)


def test_a_client_that_offers_http_2_is_answered_in_http_1(fast: Served) -> None:
    """Guards: the parser's skipping the body of such a request, which Java's client sends at first."""
    with linked(fast) as link:
        for _ in range(2):
            link.sendall(offering(GOOD))
            assert statuses(answers(link, 1)) == [200]


@pytest.mark.parametrize("path", ["/v2/models/m.plain/infer?query", "/v2/models/nowhere/infer"])
def test_a_body_that_was_skipped_is_not_taken_for_a_request(fast: Served, asgi: Served, path: str) -> None:
    inner = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    for served in (fast, asgi):
        with linked(served) as link:
            link.sendall(offering(request(b"", path=path, Content_Length=str(len(inner)))))
            link.sendall(inner)
            received = b""
            with suppress(ConnectionResetError):
                while chunk := link.recv(1 << 16):
                    received += chunk
        assert received.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in received


def test_a_middleware_is_not_passed_by(checkpoint: object) -> None:
    from starlette.responses import PlainTextResponse
    from starlette.types import ASGIApp, Receive, Scope, Send

    class Teapot:
        def __init__(self, app: ASGIApp) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await PlainTextResponse("no", status_code=418)(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    with serving(
        settings(model=(f"m={checkpoint}",)), prepare=lambda app: app.add_middleware(Teapot), wait=False
    ) as served:
        assert call(served, "POST", "/v2/models/m.plain/infer", b"{}").status == 418


def test_a_head_is_remembered_by_its_bytes() -> None:
    head = GOOD.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    first, again = parse_head(head), parse_head(bytes(bytearray(head)))
    assert first is again
    assert first is not None
    assert (first.layer, first.version, first.keep_alive) == ("m.plain", None, True)
    long = head.replace(b"Host: x", b"Host: " + b"x" * 2000)
    assert parse_head(long) is not parse_head(long)


@pytest.mark.parametrize(
    "line",
    [b"Expect: 100-continue", b"Transfer-Encoding: chunked", b"Content-Encoding: gzip", b"Host: y"],
)
def test_a_head_that_asks_for_more_is_left_to_uvicorn(line: bytes) -> None:
    head = GOOD.partition(b"\r\n\r\n")[0] + b"\r\n" + line + b"\r\n\r\n"
    assert parse_head(head) is None


def test_much_json_is_left_to_uvicorn() -> None:
    assert parse_head(b"POST /v2/models/a/infer HTTP/1.1\r\nContent-Length: 300000\r\n\r\n") is None
    binary = b"POST /v2/models/a/infer HTTP/1.1\r\nContent-Length: 300000\r\n"
    head = parse_head(binary + HEADER_LENGTH.encode() + b": 99\r\n\r\n")
    assert head is not None
    assert (head.length, head.offset) == (300000, 99)
