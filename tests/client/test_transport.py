"""The transport over real sockets: what goes out, how long it waits, whom the answers go to."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from either_transport import GET, LARGE, Make, Sending, post, threads
from gemmwire.connection import Connection
from gemmwire.deadline import Deadline
from gemmwire.errors import ConnectionFailed, GemmwireError, TimedOut, TransportError
from gemmwire.http1 import Reply, Request
from scripted_server import Served, Session, answer, replying, serve, waiting


def send(make: Make, url: str, request: Request = GET, timeout: float | None = 20.0) -> Reply:
    transport = make(url, 1)
    try:
        return transport.send(request, timeout)
    finally:
        transport.close()


def test_the_buffers_of_a_body_arrive_in_order_behind_one_length(make: Make) -> None:
    """Guards: a scattered send that loses, repeats or reorders bytes when the socket takes a part."""
    body = [b"{}", b"", os.urandom(5 << 20), b"x", os.urandom(3 << 20)]
    with serve(replying(answer(b"ok"))) as served:
        assert send(make, served.url, post(*body)).body == b"ok"

    (request,) = served.requests
    assert (request.method, request.path) == ("POST", "/infer")
    assert request.headers == {"host": "test", "content-length": str(sum(map(len, body)))}
    assert request.body == b"".join(body)


def test_small_requests_do_not_wait_for_each_other() -> None:
    """Guards: Nagle's algorithm, which holds a small segment back until the one before it is acknowledged."""
    with serve(replying(b"")) as served, socket.create_connection(("127.0.0.1", served.port)) as sock:
        Connection(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_slow_answer_ends_with_the_timeout(make: Make) -> None:
    """Guards: a call that waits for ever."""
    done = threading.Event()

    def script(session: Session, served: Served) -> None:
        session.request()
        done.wait(20)

    with serve(script) as served:
        with pytest.raises(TimedOut, match=r"/v2: no complete answer within 0.2 s"):
            send(make, served.url, timeout=0.2)
        done.set()


def test_the_timeout_is_for_the_whole_call(make: Make) -> None:
    """Guards: a server that sends a byte now and then, and so keeps a call alive for hours."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(answer(b"", content_length="1000"))
        while True:
            session.send(b"x")
            time.sleep(0.02)

    with serve(script) as served, pytest.raises(TimedOut):
        send(make, served.url, timeout=0.3)


def test_a_server_that_does_not_read_ends_with_the_timeout(make: Make) -> None:
    """Guards: a send that blocks for ever on full socket buffers."""
    done = threading.Event()

    def script(session: Session, served: Served) -> None:
        done.wait(20)

    with serve(script) as served:
        with pytest.raises(TimedOut):
            send(make, served.url, post(LARGE), timeout=0.3)
        done.set()


def test_a_call_beyond_the_connections_waits_for_one(make: Make) -> None:
    """Guards: more connections than were allowed, and a wait for one that knows no timeout."""
    entered, go_on = threading.Event(), threading.Event()
    with serve(waiting(entered, go_on, answer(b"ok"))) as served:
        transport = make(served.url, 1)
        first = threading.Thread(target=transport.send, args=(GET, 20))
        first.start()
        assert entered.wait(20)
        with pytest.raises(
            TimedOut, match=r"within 0.1 s; all of the client's connections \(1\) were in use"
        ):
            transport.send(GET, 0.1)
        go_on.set()
        first.join(20)
        assert transport.send(GET, 20).body == b"ok"
        transport.close()
    assert served.connections == 1


def test_threads_get_their_own_answers(make: Make) -> None:
    """Guards: a pool that hands one connection to two threads."""

    def script(session: Session, served: Served) -> None:
        while (request := session.request()) is not None:
            session.send(answer(request.body))

    failures: list[object] = []

    def work(transport: Sending, number: int) -> None:
        try:
            for turn in range(40):
                body = b"%d/%d " % (number, turn) * (1 + 97 * turn)
                got = transport.send(post(body), 30).body
                if got != body:
                    failures.append((body[:20], bytes(got[:20])))
        except GemmwireError as error:
            failures.append(error)

    with serve(script) as served:
        transport = make(served.url, 8)
        threads = [threading.Thread(target=work, args=(transport, number)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        transport.close()
    assert failures == []
    assert served.connections <= 8


def every_kind(base: type[BaseException]) -> list[type[BaseException]]:
    return [base, *(kind for child in base.__subclasses__() for kind in every_kind(child))]


def raised_by_sockets() -> list[type[BaseException]]:
    """Every kind of OSError that the standard library's sockets know."""
    homes = ("builtins", "socket", "_socket", "ssl", "_ssl")
    found = {kind for kind in every_kind(OSError) if kind.__module__ in homes}
    return sorted(found, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", raised_by_sockets(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("where", ["connect", "send", "receive"])
def test_no_error_of_a_socket_leaks(kind: type[OSError], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a caller who catches GemmwireError and still gets a traceback from the standard library."""

    def fail(*args: object, **named: object) -> None:
        raise kind(1, "made up")

    if where == "connect":
        monkeypatch.setattr(socket, "create_connection", fail)
    else:
        monkeypatch.setattr(Connection, "_send_some" if where == "send" else "_receive", fail)
    with serve(lambda session, served: None) as served, pytest.raises(TransportError) as caught:
        send(threads, served.url)
    assert isinstance(caught.value, ConnectionFailed)
    assert caught.value.__cause__ is not None


def test_a_host_s_addresses_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a call that waits its timeout for each address of a host, an IPv6 that leads nowhere first."""
    tried: list[tuple[object, float]] = []

    def unreachable(address: tuple[object, ...], timeout: float) -> None:
        tried.append((address, timeout))
        raise ConnectionRefusedError

    class Left(Deadline):
        seconds = iter((20.0, 5.0))

        def left(self) -> float:
            return next(self.seconds)

    addresses = [(0, 0, 0, "", ("::1", 80, 0, 0)), (0, 0, 0, "", ("127.0.0.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ConnectionRefusedError):
        threads("http://h").start(GET, Left(None))
    assert tried == [(("::1", 80), 20.0), (("127.0.0.1", 80), 5.0)]


def test_a_name_that_nobody_knows_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: "[Errno -2]" as the whole explanation of a misspelt host."""

    def unknown(*_: object, **__: object) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        ConnectionFailed, match=r"the name 'no\.such' is not known here .*is it spelled right"
    ):
        send(make, "http://no.such")


def test_a_socket_that_is_not_there_says_what_to_look_at(make: Make, tmp_path: Path) -> None:
    """Guards: "[Errno 2] No such file or directory" with no word of a server."""
    with pytest.raises(ConnectionFailed, match="there is no such socket; does a server listen there"):
        send(make, f"unix://{tmp_path}/none")


def test_a_refused_connection_says_what_to_look_at(make: Make) -> None:
    """Guards: an errno as the whole explanation of a server that is not running."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailed, match=rf"http://127.0.0.1:{port}/v2: .* does a server listen there"):
        send(make, f"http://127.0.0.1:{port}")
