"""What a client may leave undone, and for how long: the rest of a request, the reading of an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from http_calls import message
from links import GOOD, answers, held, linked, request, statuses
from serving import Served, serving, settings, until

CHUNKED = (
    b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n\r\n"
)


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def hasty(checkpoint: object, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Lets a connection rest for a second."""
    options = settings(
        model=(f"m={checkpoint}",),
        random_layer=("tall=200000x32",),
        keep_alive_s=1,
        stall_s=1,
        fast_path=request.param,
    )
    with serving(options) as served:
        yield served


def test_an_idle_connection_is_closed_and_a_used_one_is_not(hasty: Served) -> None:
    """Guards: uvicorn's timer of an earlier answer closing the connection under this path's requests."""
    with linked(hasty) as link:
        link.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        answers(link, 1)
        for _ in range(8):
            time.sleep(0.25)
            link.sendall(GOOD)
            assert statuses(answers(link, 1)) == [200]
        began = time.monotonic()
        assert link.recv(1) == b""
        assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("sent", [GOOD[:30], GOOD[:-1], CHUNKED[:-1], GOOD + GOOD[:-1]], ids=len)
def test_a_request_whose_rest_does_not_come_ends(hasty: Served, sent: bytes) -> None:
    """Guards: clients that hold their connections, and what they have sent, for ever."""
    with linked(hasty) as link:
        link.sendall(sent)
        while link.recv(1 << 16):
            pass
    until(lambda: hasty.lane.begun == 0, "the request is still under way")


@pytest.mark.parametrize("query", ["", "?asgi"])
def test_an_answer_that_is_not_read_is_let_go(hasty: Served, query: str) -> None:
    """Guards: an answer kept for ever for a client that sleeps, since closing waits until it is read."""
    body, length = message(torch.ones(20, 32))  # its answer has 16 MB
    with linked(hasty) as link:
        link.sendall(request(body, length, path="/v2/models/tall/infer" + query))
        until(lambda: hasty.engine.layers["tall"].stats.success.count, "nothing was answered")
        time.sleep(2.5)
        received = 0
        with suppress(ConnectionResetError):
            while chunk := link.recv(1 << 20):
                received += len(chunk)
    assert received < 16_000_000


def test_a_client_that_waits_for_the_device_or_reads_slowly_is_not_stuck(hasty: Served) -> None:
    big = request(*message(torch.ones(20, 32)), path="/v2/models/tall/infer")
    with linked(hasty) as link:
        with held(hasty):
            link.sendall(big)
            time.sleep(2.2)
        received = 0
        for _ in range(6):
            time.sleep(0.5)
            received += len(link.recv(1 << 21))
        assert received < 16_000_000, "the test read too fast to show anything"
        while received < 16_000_000:
            chunk = link.recv(1 << 20)
            assert chunk, f"closed after {received} bytes"
            received += len(chunk)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nA: " + b"x" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 20_000,
        b"GET /" + b"x" * 200_000,
        GOOD + b"GET /" + b"x" * 200_000,
        CHUNKED[:-2] + b"A: x\r\n" * 20_000,
    ],
    ids=["field", "fields", "target", "second", "trailer"],
)
def test_a_head_has_an_end(server: Served, sent: bytes) -> None:
    """Guards: a header without an end, joined anew with each piece that comes of it, on the event loop."""
    with linked(server) as link, suppress(ConnectionError):
        for start in range(0, len(sent), 10_000):
            link.sendall(sent[start : start + 10_000])
            time.sleep(0.001)
        received = b""
        while chunk := link.recv(1 << 16):
            received += chunk
        assert b"HTTP/1.1 431 " in received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X-Long: " + b"x" * 60_000, 200),
        (b"X-Long: " + b"x" * 100_000, 431),
        (b"A: x\r\n" * 25_000 + b"A: x", 431),
    ],
    ids=["below", "field", "fields"],
)
def test_a_head_in_one_piece_has_the_same_bound(server: Served, head: bytes, status: int) -> None:
    """Guards: a bound that only what comes in pieces has, and a request that is sometimes refused."""
    with linked(server) as link, suppress(ConnectionError):
        link.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        assert statuses([link.recv(1 << 16)]) == [status]


def test_a_target_in_one_piece_has_it_too(server: Served) -> None:
    with linked(server) as link, suppress(ConnectionError):
        link.sendall(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["at-once", "behind"])
def test_a_large_head_costs_the_request_before_it_nothing(server: Served, pause: float) -> None:
    """Guards: a connection that is closed with an answer under way."""
    long = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n"
    with linked(server) as link:
        with held(server):
            for sent in (GOOD + long,) if not pause else (GOOD, long):
                link.sendall(sent)
                time.sleep(pause)
        assert statuses(answers(link, 2)) == [200, 431]
