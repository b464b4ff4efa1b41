"""Connections that are used again, and those that must not be."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from either_transport import GET, LARGE, Make, post
from gemmwire.errors import ConnectionFailed, WireError
from gemmwire.transport import HTTPTransport
from gemmwire.url import parse_url
from scripted_server import Served, Session, answer, replying, serve, waiting


def test_a_connection_closed_between_requests_is_replaced(make: Make) -> None:
    """Guards: the error that every keep-alive client meets after a few idle seconds."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(answer(b"ok"))

    with serve(script) as served:
        transport = make(served.url, 1)
        for _ in range(4):
            assert transport.send(GET, 20).body == b"ok"
        transport.close()
    assert served.connections == 4


def test_a_connection_closed_under_a_request_is_replaced_once(make: Make) -> None:
    """Guards: the race between a server's idle timeout and the next request on that connection."""

    def script(session: Session, served: Served) -> None:
        number = served.connections
        session.request()
        session.send(answer(b"%d" % number))
        session.request()  # taken, and the connection closed without an answer

    with serve(script) as served:
        transport = make(served.url, 1)
        assert [transport.send(GET, 20).body for _ in range(3)] == [b"1", b"2", b"3"]
        transport.close()


def test_a_fresh_connection_is_not_tried_again(make: Make) -> None:
    """Guards: a request that kills its server being sent to it over and over."""

    def script(session: Session, served: Served) -> None:
        request = session.request()
        assert request is not None
        served.requests.append(request)
        if len(served.requests) == 1:
            session.send(answer(b"ok"))
            session.request()

    with serve(script) as served:
        transport = make(served.url, 1)
        transport.send(GET, 20)
        with pytest.raises(ConnectionFailed, match="without an answer"):
            transport.send(GET, 20)
        transport.close()
    assert len(served.requests) == 2


def test_a_connection_closed_before_its_first_request_is_an_error_at_once(make: Make) -> None:
    """Guards: a call that waits for its whole timeout where a server accepts and hangs up, being full."""
    with serve(lambda session, served: None) as served:
        transport = make(served.url, 1)
        for _ in range(20):
            with pytest.raises(ConnectionFailed):
                transport.send(GET, 20)
        transport.close()


def test_bytes_that_nobody_asked_for_are_not_the_next_answer(make: Make) -> None:
    """Guards: the 408 that a server sends into an idle connection, read as the answer to the next request."""
    sent = threading.Event()

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(answer(b"%d" % served.connections))
        session.send(answer(b"too late", status="408 Request Timeout"))
        sent.set()
        session.request()

    with serve(script) as served:
        transport = make(served.url, 1)
        first = transport.send(GET, 20)
        assert sent.wait(20)
        time.sleep(0.05)
        second = transport.send(GET, 20)
        transport.close()
    assert (first.status, first.body.decode()) == (200, "1")
    assert (second.status, second.body.decode()) == (200, "2")


@pytest.mark.parametrize("closes", [True, False], ids=["and-closes", "and-stays-open"])
def test_an_answer_before_the_body_was_taken_is_read(make: Make, closes: bool) -> None:
    """Guards: BrokenPipeError in place of the server's 413, and a send into a server that does not read."""
    done = threading.Event()

    def script(session: Session, served: Served) -> None:
        session.head()
        session.send(answer(b"too large", status="413 Content Too Large"))
        if not closes:
            done.wait(20)

    with serve(script) as served:
        transport = make(served.url, 1)
        reply = transport.send(post(LARGE, LARGE), 20)
        done.set()
        transport.close()
    assert (reply.status, reply.body.decode()) == (413, "too large")


def test_a_connection_with_an_unsent_body_is_not_used_again(make: Make) -> None:
    """Guards: the rest of a body that was given up, read by the server as the next request."""

    answered = threading.Event()  # until then the body is not taken

    def script(session: Session, served: Served) -> None:
        session.head()
        session.send(answer(b"%d" % served.connections))
        answered.wait(20)
        while session.sock.recv(1 << 20):
            pass

    with serve(script) as served:
        transport = make(served.url, 1)
        first = transport.send(post(LARGE), 20).body
        answered.set()
        assert [first, transport.send(post(LARGE), 20).body] == [b"1", b"2"]
        transport.close()


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(answer(b"ok", connection="close"), id="connection-close"),
        pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", id="http-1.0"),
        pytest.param(answer(b"ok") + b"stray", id="bytes-behind-the-body"),
    ],
)
def test_a_connection_that_ends_with_its_answer_is_not_used_again(make: Make, reply: bytes) -> None:
    """Guards: a request written into a connection whose server reads no further."""
    with serve(replying(reply)) as served:
        transport = make(served.url, 1)
        assert [transport.send(GET, 20).body for _ in range(2)] == [b"ok", b"ok"]
        transport.close()
    assert served.connections == 2


def test_a_failed_call_leaves_no_connection_behind(make: Make) -> None:
    """Guards: slots that leak with each error until every call waits for ever."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(b"garbage\r\n\r\n" if served.connections <= 3 else answer(b"ok"))

    with serve(script) as served:
        transport = make(served.url, 1)
        for _ in range(3):
            with pytest.raises(WireError):
                transport.send(GET, 20)
        assert transport.send(GET, 20).body == b"ok"
        transport.close()


def test_a_closed_client_refuses(make: Make) -> None:
    """Guards: a connection opened after close(), which nobody closes."""
    with serve(replying(answer(b"ok"))) as served:
        transport = make(served.url, 1)
        transport.close()
        with pytest.raises(ConnectionFailed, match="this client has been closed"):
            transport.send(GET, 20)
    assert served.connections == 0


def test_a_call_that_waits_while_its_client_closes_is_refused(make: Make) -> None:
    """Guards: a connection opened after close(), by a call that was in the line before it."""
    entered, go_on = threading.Event(), threading.Event()
    with serve(waiting(entered, go_on, answer(b"ok"))) as served, ThreadPoolExecutor(2) as pool:
        transport = make(served.url, 1)
        first = pool.submit(transport.send, GET, 20)
        assert entered.wait(20)
        second = pool.submit(transport.send, GET, 20)
        time.sleep(0.05)  # it waits; before that, it is refused as well
        transport.close()
        go_on.set()
        assert first.result(20).body == b"ok"
        with pytest.raises(ConnectionFailed, match="this client has been closed"):
            second.result(20)
    assert served.connections == 1


def test_a_dropped_client_closes_its_connections() -> None:
    """Guards: a ResourceWarning for `Client(url).infer(...)` in one line."""
    with serve(replying(answer(b"ok"))) as served:
        HTTPTransport(parse_url(served.url), 1).send(GET, 20)
        gc.collect()  # a warning of an unclosed socket would be an error here


def test_a_forked_child_has_connections_of_its_own() -> None:
    """Guards: answers that parent and child take from each other, as in the workers of a data loader."""
    program = """
        import os, sys
        from gemmwire.http1 import Request
        from gemmwire.transport import HTTPTransport
        from gemmwire.url import parse_url

        transport = HTTPTransport(parse_url(sys.argv[1]), 1)
        get = Request("GET", "/", {"host": "test"})
        os.write(1, transport.send(get, 20).body + b" ")
        child = os.fork()
        os.write(1, transport.send(get, 20).body + b" ")
        if child:
            os.waitpid(child, 0)
    """

    def script(session: Session, served: Served) -> None:
        number = served.connections
        while session.request() is not None:
            session.send(answer(b"%d" % number))

    with serve(script) as served:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), served.url],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stderr == ""
    assert sorted(done.stdout.split()) == ["1", "1", "2"]
