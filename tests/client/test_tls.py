"""https: the same transport with certificates checked."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from gemmwire.errors import ConnectionFailed
from gemmwire.http1 import Request
from gemmwire.transport import HTTPTransport
from gemmwire.url import parse_url
from scripted_server import Script, Served, Session, answer, replying, serve


def post(*body: bytes) -> Request:
    return Request("POST", "/infer", {"host": "test"}, body)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate with")
    key, certificate, both = (tmp_path_factory.getbasetemp() / name for name in ("key", "crt", "pem"))
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-subj", "/CN=localhost", "-addext", names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both


def over_tls(certificate: Path, script: Script) -> Script:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def wrapped(session: Session, served: Served) -> None:
        try:
            with context.wrap_socket(session.sock, server_side=True) as sock:
                script(Session(sock), served)
        except ssl.SSLError:
            pass  # a client that does not trust us

    return wrapped


def test_https_sends_and_receives_over_one_connection(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a scattered send on a TLS socket, which has none."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    data = os.urandom(3 << 20)
    with serve(over_tls(certificate, replying(answer(data)))) as served:
        transport = HTTPTransport(parse_url(f"https://127.0.0.1:{served.port}"), 1)
        for _ in range(3):
            assert transport.send(post(b"head", data), 20).body == data
        transport.close()
    assert served.connections == 1
    assert [request.body for request in served.requests] == [b"head" + data] * 3


def test_https_refuses_a_certificate_that_nobody_vouches_for(certificate: Path) -> None:
    """Guards: encryption towards whoever answers."""
    with serve(over_tls(certificate, replying(answer()))) as served:
        transport = HTTPTransport(parse_url(f"https://127.0.0.1:{served.port}"), 1)
        with pytest.raises(ConnectionFailed, match="certificate"):
            transport.send(post(), 20)
        transport.close()
    assert served.requests == []
