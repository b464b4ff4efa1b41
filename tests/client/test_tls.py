"""https: the same transport with certificates checked."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from certificates import made_for
from either_transport import Make, post
from gemmwire import Client, InvalidArgument
from gemmwire.deadline import Deadline
from gemmwire.errors import ConnectionFailed
from gemmwire.http1 import Request
from gemmwire.tls import TLS, context_for
from gemmwire.transport import HTTPTransport
from gemmwire.url import parse_url
from scripted_server import Script, Served, Session, answer, replying, serve


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_for("DNS:localhost,IP:127.0.0.1", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def another_s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_for("DNS:another.test", tmp_path_factory.mktemp("another"))


def over_tls(certificate: Path, script: Script, *, clients: bool = False) -> Script:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate)

    def wrapped(session: Session, served: Served) -> None:
        try:
            with context.wrap_socket(session.sock, server_side=True) as sock:
                script(Session(sock), served)
        except ssl.SSLError:
            pass  # a client that does not trust us

    return wrapped


HTTPS = parse_url("https://h")


def test_https_sends_and_receives_over_one_connection(make: Make, certificate: Path) -> None:
    """Guards: a scattered send on a TLS socket, which has none."""
    data = os.urandom(3 << 20)
    with serve(over_tls(certificate, replying(answer(data)))) as served:
        transport = make(f"https://127.0.0.1:{served.port}", 1, context_for(HTTPS, TLS(ca=str(certificate))))
        for _ in range(3):
            assert transport.send(post(b"head", data), 20).body == data
        transport.close()
    assert served.connections == 1
    assert [request.body for request in served.requests] == [b"head" + data] * 3


@pytest.mark.parametrize("trusted", [False, True], ids=["nobody-vouches", "of-another-host"])
def test_https_refuses_a_certificate_that_proves_nothing(make: Make, trusted: bool, another_s: Path) -> None:
    """Guards: encryption towards whoever answers; a certificate of another host taken for this one's."""
    tls = TLS(ca=str(another_s)) if trusted else TLS()
    with serve(over_tls(another_s, replying(answer()))) as served:
        transport = make(f"https://127.0.0.1:{served.port}", 1, context_for(HTTPS, tls))
        with pytest.raises(ConnectionFailed, match="certificate") as caught:
            transport.send(post(), 20)
        transport.close()
    assert served.requests == []
    assert not caught.value.passing


def test_https_to_a_server_of_http_says_so(make: Make) -> None:
    """Guards: "[SSL: WRONG_VERSION_NUMBER]" as the whole explanation of one letter too many."""

    def plain(session: Session, served: Served) -> None:
        session.sock.recv(100)
        session.sock.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with serve(plain) as served:
        transport = make(f"https://127.0.0.1:{served.port}", 1, context_for(HTTPS, None))
        with pytest.raises(ConnectionFailed, match=r"does not speak TLS .* is it http:// and not https://"):
            transport.send(post(), 20)
        transport.close()


def test_the_system_s_authorities_are_the_default(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: SSL_CERT_FILE, which containers are configured by, without effect."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with (
        serve(over_tls(certificate, replying(answer()))) as served,
        Client(f"https://127.0.0.1:{served.port}") as c,
    ):
        assert c.ready()


def test_verification_can_be_switched_off(certificate: Path) -> None:
    with (
        serve(over_tls(certificate, replying(answer()))) as served,
        Client(f"https://127.0.0.1:{served.port}", tls=TLS(verify=False)) as c,
    ):
        assert c.ready()


def test_a_server_that_asks_for_it_sees_the_client_s_certificate(certificate: Path) -> None:
    """Guards: a client certificate that is read and never shown."""
    with serve(over_tls(certificate, replying(answer()), clients=True)) as served:
        url = f"https://127.0.0.1:{served.port}"
        with Client(url, tls=TLS(ca=str(certificate), certificate=str(certificate))) as c:
            assert c.ready()
        with Client(url, tls=TLS(ca=str(certificate)), retries=0) as c, pytest.raises(ConnectionFailed):
            c.ready()
    assert len(served.requests) == 1


@pytest.mark.parametrize(
    ("url", "tls", "words"),
    [
        pytest.param("http://h", TLS(), "is not https", id="http"),
        pytest.param("https://h", TLS(ca="nowhere.pem"), "nowhere.pem", id="no-such-file"),
        pytest.param("https://h", TLS(key="key.pem"), "no certificate", id="key-alone"),
        pytest.param("https://h", "ca.pem", "tls is of type str", id="path"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(url: str, tls: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Client(url, tls=tls)


def test_the_handshake_has_what_the_connection_left_of_the_time() -> None:
    """Guards: a call that waits twice its timeout, once for the connection and once for the handshake."""

    class Left(Deadline):
        seconds = iter((20.0, 5.0))

        def left(self) -> float:
            return next(self.seconds)

    class Handshake(ssl.SSLContext):
        def wrap_socket(self, sock: socket.socket, *_: Any, **__: Any) -> ssl.SSLSocket:
            raise OSError(f"{sock.gettimeout()} s are left")

    with serve(replying(answer(b"ok"))) as served:
        transport = HTTPTransport(parse_url(served.url), 1, Handshake(ssl.PROTOCOL_TLS_CLIENT))
        with pytest.raises(OSError, match=r"5\.0 s are left"):
            transport.start(Request("GET", "/", {}), Left(None))
