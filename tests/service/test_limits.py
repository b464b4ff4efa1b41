"""What many clients at once, or one with bad intent, may take of the server."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from gemmwire_service.errors import QueueFull
from gemmwire_service.held import Held
from gemmwire_service.patience import Patience, Watch
from http_calls import call, infer, message
from links import GOOD, X, answers, held, linked, request, statuses
from serving import Served, serving, settings, until

PATHS = pytest.mark.parametrize("fast", [True, False], ids=["fast-path", "asgi"])
GOOD_HEAD = b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
HALF = [
    pytest.param(GOOD[:30], id="half-a-head"),
    pytest.param(GOOD[:-1], id="half-a-body"),
    pytest.param(GOOD.replace(b"/infer", b"/infer?q", 1)[:-1], id="half-a-body-by-asgi"),
    pytest.param(
        b"PUT /v2/repository/models/m.plain/weights HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nab",
        id="half-a-weight",
    ),
    pytest.param(
        b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nab",
        id="half-a-chunk",
    ),
    pytest.param(GOOD + GOOD[:-1], id="a-second-half"),
]


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def hasty(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    options = settings(
        model=(f"m={checkpoint}",),
        random_layer=("tall=200000x32",),
        stall_s=1,
        min_bytes_per_s=1000,
        fast_path=request.param,
    )
    with serving(options) as served:
        yield served


def rest(link: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while chunk := link.recv(1 << 20):
            received += chunk
    return received


@pytest.mark.parametrize("sent", HALF)
def test_half_a_request_is_told_why_it_is_closed(hasty: Served, sent: bytes) -> None:
    with linked(hasty) as link:
        link.sendall(sent)
        received = rest(link)
    last = received[received.rindex(b"HTTP/1.1 ") :]
    assert last.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "body_stalled"' in last
    assert b"connection: close" in last.lower()
    until(lambda: hasty.engine.held.total == 0, "bytes are counted for a client that is gone")


def test_a_client_that_trickles_is_cut_off(hasty: Served) -> None:
    """Guards: a byte now and then that keeps a connection, and the memory of its body, for ever."""
    head = GOOD_HEAD % 100_000
    for slow in (head, GOOD[:20]):
        with linked(hasty) as link:
            link.sendall(slow)
            began = time.monotonic()
            with suppress(ConnectionError):
                while time.monotonic() - began < 15:
                    link.sendall(b"a")
                    time.sleep(0.2)
            assert time.monotonic() - began < 15
    until(lambda: hasty.engine.held.total == 0, "bytes are counted for a client that is gone")


def test_a_slow_client_above_the_rate_is_served(hasty: Served) -> None:
    body, length = message(torch.ones(16, 128))
    sent = request(body, length)
    with linked(hasty) as link:
        for start in range(0, len(sent), 1000):
            link.sendall(sent[start : start + 1000])
            time.sleep(0.25)
        assert statuses(answers(link, 1)) == [200]


def test_an_answer_that_trickles_out_is_let_go(hasty: Served) -> None:
    """Guards: a client that reads a little now and then, and holds megabytes of answer for hours."""
    slow = settings(random_layer=("tall=200000x32",), stall_s=1, min_bytes_per_s=8_000_000)
    with serving(slow) as served, linked(served) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        link.sendall(request(*message(torch.ones(60, 32)), path="/v2/models/tall/infer"))  # 48 MB
        until(lambda: served.engine.held.unread > 1 << 20, "the answer is not counted")
        received = 0
        with suppress(ConnectionError):
            while chunk := link.recv(1 << 16):
                received += len(chunk)
                time.sleep(0.05)
        assert received < 48_000_000
        until(lambda: served.engine.held.total == 0, "the answer is counted for ever")


@PATHS
def test_one_connection_too_many_is_told_and_the_others_are_not_disturbed(
    checkpoint: Path, fast: bool
) -> None:
    """Guards: a client that hangs in the backlog; a bound that closed connections still count in."""
    options = settings(model=(f"m={checkpoint}",), max_connections=3, fast_path=fast)
    with serving(options) as served, ExitStack() as stack:
        links = [stack.enter_context(linked(served)) for _ in range(3)]
        for link in links:
            link.sendall(GOOD)
            assert statuses(answers(link, 1)) == [200]
        for _ in range(3):
            with linked(served) as surplus:
                surplus.sendall(GOOD)
                answer = rest(surplus)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"code": "connections_full"' in answer
            assert b"retry-after: 1" in answer
        with linked(served) as silent:
            assert rest(silent) == b""
        links[0].sendall(GOOD)
        assert statuses(answers(links[0], 1)) == [200]
        links.pop().close()
        until(lambda: served.lane.connections == 2, "a closed connection counts")
        with linked(served) as link:
            link.sendall(GOOD)
            assert statuses(answers(link, 1)) == [200]
    assert served.engine.traffic.rejects["connections_full"] == 3


def test_hundreds_too_many_are_closed_at_once(checkpoint: Path) -> None:
    with serving(settings(model=(f"m={checkpoint}",), max_connections=1)) as served, linked(served) as first:
        first.sendall(GOOD)
        answers(first, 1)
        with ExitStack() as stack:
            links = [stack.enter_context(linked(served)) for _ in range(200)]
            assert [rest(link) for link in links] == [b""] * 200
        until(lambda: served.lane.surplus == 0, "connections that are gone are counted")
        first.sendall(GOOD)
        assert statuses(answers(first, 1)) == [200]


@PATHS
def test_bodies_that_are_coming_are_bounded_together(checkpoint: Path, fast: bool) -> None:
    """Guards: many clients who each announce the largest body that may be."""
    options = settings(model=(f"m={checkpoint}",), max_queue_bytes=100_000, fast_path=fast)
    head = GOOD_HEAD % 60_000
    with serving(options) as served:
        with linked(served) as first, linked(served) as second:
            first.sendall(head)
            until(lambda: served.engine.held.receiving == 60_000, "the body is not counted")
            second.sendall(head)
            answer = answers(second, 1)[0]
            assert statuses([answer]) == [503]
            assert b'"code": "queue_full"' in answer
            assert b"60000 are coming" in answer
        until(lambda: served.engine.held.total == 0, "a client that left is counted")
        body, length = message(X)
        assert infer(served, "m.plain", body, length).status == 200
        assert served.engine.held.total == 0


def test_chunked_and_compressed_bodies_are_counted_as_they_grow(checkpoint: Path) -> None:
    """Guards: kilobytes that inflate to the largest body, many at once."""
    options = settings(model=(f"m={checkpoint}",), max_queue_bytes=400_000, max_body_bytes=300_000)
    with serving(options) as served, linked(served) as link:
        link.sendall(
            b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"30d40\r\n"
            + b"a" * 200_000
            + b"\r\n"
        )
        until(lambda: served.engine.held.receiving == 200_000, "chunks are not counted")
        bomb = gzip.compress(b" " * 290_000)
        reply = infer(served, "m.plain", bomb, Content_Encoding="gzip")
        assert (reply.status, reply.json["code"]) == (503, "queue_full")
        small = gzip.compress(message(X)[0])
        length = message(X)[1]
        link.close()
        until(lambda: served.engine.held.total == 0, "a client that left is counted")
        assert infer(served, "m.plain", small, length, Content_Encoding="gzip").status == 200
        assert served.engine.held.total == 0


@PATHS
def test_answers_that_are_not_read_keep_others_out_only_while_they_last(fast: bool) -> None:
    """Guards: gigabytes of answers for clients that sleep, one each."""
    options = settings(random_layer=("tall=200000x32",), max_queue_bytes=20_000_000, fast_path=fast)
    big = request(*message(torch.ones(20, 32)), path="/v2/models/tall/infer")  # 16 MB
    with serving(options) as served, linked(served) as sleeper, linked(served) as other:
        sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sleeper.sendall(big)
        until(lambda: served.engine.held.unread > 8_000_000, "the answer is not counted")
        other.sendall(big)
        answer = answers(other, 1)[0]
        assert statuses([answer]) == [503]
        assert b"are not read" in answer
        sleeper.close()
        until(lambda: served.engine.held.total == 0, "an answer of nobody is counted")
        other.sendall(big)
        assert statuses(answers(other, 1)) == [200]


@PATHS
def test_the_queue_is_bounded_by_rows(checkpoint: Path, fast: bool) -> None:
    options = settings(model=(f"m={checkpoint}",), max_queue_rows=5, max_rows=8, fast_path=fast)
    with serving(options) as served, linked(served) as first, linked(served) as second:
        with held(served):
            first.sendall(GOOD)  # 3 rows
            until(lambda: served.engine.waiting_rows == 3, "nothing waits")
            second.sendall(GOOD)
            answer = answers(second, 1)[0]
            assert statuses([answer]) == [503]
            assert b"3 rows wait and 3 more pass the bound of 5" in answer
            assert b"retry-after" in answer
        assert statuses(answers(first, 1)) == [200]
        body, length = message(torch.ones(8, 128))
        assert infer(served, "m.plain", body, length).status == 200
        body, length = message(torch.ones(9, 128))
        reply = infer(served, "m.plain", body, length)
        assert (reply.status, reply.json["code"], reply.json["got"]) == (413, "rows_too_many", 9)


@PATHS
def test_bounds_are_exact_after_everything_that_can_go_wrong(checkpoint: Path, fast: bool) -> None:
    """Guards: a count that drifts with each refusal until nothing is taken any more."""
    body, length = message(X)
    with serving(settings(model=(f"m={checkpoint}",), fast_path=fast)) as served:
        for _ in range(3):
            infer(served, "m.plain", body[:-1], length)
            infer(served, "m.plain", b"{", None)
            infer(served, "m.nowhere", body, length)
            infer(served, "m.plain", body, length, gemmwire_timeout_us="1")
            infer(served, "m.plain", b"\x1f\x8b", Content_Encoding="gzip")
            call(served, "POST", "/v2/models/m.plain/infer", iter([b"{", b"}"]))
            with linked(served) as link:
                link.sendall(GOOD[:-5])
            with linked(served) as link:
                link.sendall(GOOD)
        until(lambda: served.engine.held.total == 0, "bytes are held by nobody")
        until(lambda: served.lane.connections == 0, "connections are held by nobody")
        assert (served.engine.waiting, served.engine.waiting_rows, served.lane.begun) == (0, 0, 0)


def test_held_takes_one_of_any_size_and_counts_it() -> None:
    bound = Held(10)
    with bound.coming() as coming:
        coming.grow(50)
        with pytest.raises(QueueFull, match="50 bytes of requests"):
            bound.refuse(1)
        with pytest.raises(QueueFull):
            coming.grow(1)
        assert bound.receiving == 50
    assert bound.total == 0


def test_a_watch_counts_progress_and_rate() -> None:
    patience = Patience(75, 30, 1000)
    watch = Watch(patience, 100.0)
    assert watch.idle(100.0) == 75
    watch.active = 110.0
    assert watch.sending(110.0, 100.0, 0) == 20  # the whole has 30 s from its beginning
    assert watch.sending(110.0, 100.0, 5_000) == 25
    assert watch.sending(110.0, 100.0, 1_000_000) == 30  # no byte for 30 s
    assert watch.reading(200.0, 0) == float("inf")
    assert watch.reading(200.0, 60_000) == 30
    assert watch.reading(230.0, 50_000) == 30
    assert watch.reading(260.0, 40_000) == 30
    assert watch.reading(289.0, 30_000) == 1  # 60_000 bytes take 60 s, and 30 s more
    assert watch.reading(300.0, 0) == float("inf")
    assert watch.reading(301.0, 10_000) == 30
