"""Answers as servers, proxies and things that are neither frame them, over real sockets."""

from __future__ import annotations

import os
import socket

import pytest

from either_transport import Make
from gemmwire.errors import ConnectionFailed, WireError
from gemmwire.http1 import Reply, Request
from gemmwire.transport import HTTPTransport
from gemmwire.url import parse_url
from scripted_server import Served, Session, answer, replying, serve

GET = Request("GET", "/v2", {"host": "test"})
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def send(url: str, request: Request = GET, timeout: float | None = 20.0) -> Reply:
    transport = HTTPTransport(parse_url(url), 1)
    try:
        return transport.send(request, timeout)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        pytest.param(answer(b"abc"), b"abc", id="content-length"),
        pytest.param(answer(), b"", id="empty"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", b"", id="204-without-length"),
        pytest.param(
            CHUNKED + b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: 1\r\n\r\n",
            b"abc0123456789",
            id="chunked-with-extension-and-trailer",
        ),
        pytest.param(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" + answer(b"abc"),
            b"abc",
            id="behind-informational-heads",
        ),
        pytest.param(b"HTTP/1.1 200\r\ncontent-length: 1\r\n\r\nx", b"x", id="no-reason-phrase"),
    ],
)
def test_each_framing_is_read_and_leaves_the_connection_usable(reply: bytes, body: bytes) -> None:
    """Guards: an answer of a proxy that frames otherwise, and bytes of one answer taken for the next."""
    with serve(replying(reply)) as served:
        transport = HTTPTransport(parse_url(served.url), 1)
        assert [transport.send(GET, 20).body for _ in range(3)] == [body] * 3
        transport.close()
    assert served.connections == 1


def test_a_body_may_end_with_its_connection() -> None:
    """Guards: an HTTP/1.0 proxy whose answers have no length."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(b"HTTP/1.0 200 OK\r\n\r\n", b"a" * 100_000, b"b")

    with serve(script) as served:
        assert send(served.url).body == b"a" * 100_000 + b"b"


def test_an_answer_in_single_bytes_is_read() -> None:
    """Guards: a reader that takes one receive for one answer."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in answer(b"abc", x_a="1"):
            session.send(bytes([byte]))

    with serve(script) as served:
        reply = send(served.url)
    assert reply.status == 200
    assert reply.headers == {"content-length": "3", "x-a": "1"}
    assert reply.body == b"abc"


def test_a_large_body_is_one_buffer_that_can_be_written() -> None:
    """Guards: an array over memory that torch warns about, or that a second answer overwrites."""
    data = os.urandom(6 << 20)
    with serve(replying(answer(data), answer(b"second"))) as served:
        transport = HTTPTransport(parse_url(served.url), 1)
        first = transport.send(GET, 20)
        transport.send(GET, 20)
        transport.close()
    assert type(first.body) is bytearray
    assert first.body == data


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "SSH-2.0", id="not-http"),
        pytest.param(b"HTTP/2 200 OK\r\n\r\n", "HTTP/2", id="http-2"),
        pytest.param(b"HTTP/1.1 20 OK\r\n\r\n", "HTTP/1.1 20", id="two-digit-status"),
        pytest.param(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "no colon", id="header-without-colon"),
        pytest.param(b"HTTP/1.1 200 OK\r\na: 1\r\n folded\r\n\r\n", "folded", id="folded-header"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "'-1'", id="negative-length"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 1_0\r\n\r\n", "'1_0'", id="underscore-length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
            "two lengths",
            id="two-lengths",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length: 9223372036854775808\r\n\r\n", "at most", id="length-2^63"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
            "gzip",
            id="other-transfer-encoding",
        ),
        pytest.param(
            CHUNKED + b"xyz\r\n",
            "chunk",
            id="chunk-size-no-number",
        ),
        pytest.param(
            CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
            "longer",
            id="chunk-too-long",
        ),
        pytest.param(CHUNKED + b"-1\r\n", "chunk", id="chunk-size-negative"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000, "more than", id="endless-head"),
    ],
)
def test_garbage_is_said_to_be_garbage(reply: bytes, words: str) -> None:
    """Guards: a port of something else, or a broken proxy, that ends in a hang or a foreign error."""
    with serve(replying(reply)) as served, pytest.raises(WireError, match="answer is not HTTP") as caught:
        send(served.url)
    assert caught.value.code == "http_invalid"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 1152921504606846976\r\n\r\n", id="length"),
        pytest.param(CHUNKED + b"1000000000000000\r\n", id="chunk"),
    ],
)
def test_a_body_beyond_the_memory_is_refused(
    make: Make, reply: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a MemoryError, and an event loop that goes on with half of an exchange."""
    monkeypatch.setattr("gemmwire.http1.MAX_BODY", 1 << 62)
    with serve(replying(reply)) as served:
        transport = make(served.url)
        with pytest.raises(WireError, match="announces 1152921504606846976 bytes, for which there is no"):
            transport.send(GET, 20)
        transport.close()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        pytest.param(answer(b"x" * 100, content_length="2048"), "after 100 of 2048 bytes", id="body"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-le", "in the middle of an answer's head", id="head"),
        pytest.param(CHUNKED + b"5\r\nab", "after 2 of 5 bytes", id="chunk"),
        pytest.param(b"", "without an answer", id="nothing"),
    ],
)
def test_a_truncated_answer_is_no_answer(reply: bytes, words: str) -> None:
    """Guards: half an array handed to the caller, or an endless wait for the other half."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(reply)

    with serve(script) as served, pytest.raises(ConnectionFailed, match=words) as caught:
        send(served.url)
    assert str(caught.value).startswith(f"GET {served.url}/v2: ")
