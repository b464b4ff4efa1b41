"""https at the port: by both paths of infer, with certificates that are renewed while it serves."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from certificates import made_for
from gemmwire import TLS, Client
from gemmwire_service.errors import SettingsError
from gemmwire_service.tls import Certificate, certificate_of
from http_calls import message
from keyed import drawn
from links import GOOD, X, answers, request, statuses
from serving import Served, serving, settings, until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_for("DNS:localhost,IP:127.0.0.1", tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def secured(certificate: Path, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    options = settings(
        model=(f"m={checkpoint}",),
        random_layer=("tall=200000x32",),
        tls_cert=str(certificate),
        fast_path=request.param,
        uds=str(certificate.parent / f"{request.param}.sock"),
    )
    with serving(options) as served:
        yield served


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def test_the_client_computes_over_https(secured: Served, certificate: Path) -> None:
    """A large answer too, in pieces of many TLS records."""
    x = torch.arange(20 * 32, dtype=torch.float32).view(20, 32) / 64
    with Client(f"https://127.0.0.1:{secured.port}", tls=TLS(ca=str(certificate))) as client:
        assert client.infer("m.plain", torch.ones(3, 128)).shape == (3, 64)
        y = client.infer("tall", x)
        assert torch.equal(client.infer("tall", x), y)
        assert client.layer("m.plain").n == 64


def test_a_request_in_small_records_and_two_at_once(secured: Served, certificate: Path) -> None:
    """Guards: a body that TLS hands over in other pieces than the socket does."""
    with (
        socket.create_connection(("127.0.0.1", secured.port), timeout=20) as plain,
        trusting(certificate).wrap_socket(plain, server_hostname="localhost") as link,
    ):
        for start in range(0, len(GOOD), 97):
            link.sendall(GOOD[start : start + 97])
        first = answers(link, 1)
        link.sendall(GOOD + GOOD)
        assert [answer.partition(b"\r\n\r\n")[2] == b"" for answer in first] == [False]
        assert statuses(first + answers(link, 2)) == [200, 200, 200]


def test_the_unix_socket_beside_it_speaks_plain_http(secured: Served, certificate: Path) -> None:
    """Guards: a socket of this machine that no client can use, since none speaks TLS there."""
    path = next(path for path in certificate.parent.glob("*.sock"))
    until(path.exists, "there is no socket")
    with Client(f"unix://{path}") as client:
        assert client.infer("m.plain", torch.ones(1, 128)).shape == (1, 64)


def test_plain_http_and_old_tls_get_nothing(secured: Served, certificate: Path) -> None:
    """Guards: a key that is sent unencrypted and works."""
    with socket.create_connection(("127.0.0.1", secured.port), timeout=20) as link:
        link.sendall(GOOD)
        received = b""
        try:
            while chunk := link.recv(4096):
                received += chunk
        except ConnectionError:
            pass
        assert not received.startswith(b"HTTP")
    context = trusting(certificate)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA:@SECLEVEL=0")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    link_to = http.client.HTTPSConnection("127.0.0.1", secured.port, timeout=20, context=context)
    with pytest.raises(ssl.SSLError):
        link_to.request("GET", "/v2")


def test_keys_go_over_https(certificate: Path, checkpoint: Path, tmp_path: Path) -> None:
    keys = drawn(tmp_path)
    options = settings(model=(f"m={checkpoint}",), tls_cert=str(certificate), key_file=str(keys.path))
    with (
        serving(options) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=20) as plain,
        trusting(certificate).wrap_socket(plain, server_hostname="localhost") as link,
    ):
        link.sendall(request(*message(X), Authorization=f"Bearer {keys.infer}") + GOOD)
        assert statuses(answers(link, 2)) == [200, 401]


def presented(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain) as link,
    ):
        return link.getpeercert(binary_form=True) or b""


def test_a_renewed_certificate_is_shown_to_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a restart for every renewal; a half-written file that ends https."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = made_for("DNS:localhost", tmp_path / "old")
    new = made_for("DNS:localhost", tmp_path / "new")
    path = tmp_path / "server.pem"
    path.write_bytes(old.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    certificate = Certificate(str(path), "")

    def shown() -> bytes:
        import threading

        with socket.create_server(("127.0.0.1", 0)) as listener:

            def once() -> None:
                with listener.accept()[0] as link, context.wrap_socket(link, server_side=True) as tls:
                    tls.recv(1)

            thread = threading.Thread(target=once)
            thread.start()
            found = presented(listener.getsockname()[1])
            thread.join()
        return found

    first = shown()
    path.write_bytes(new.read_bytes()[:100])
    certificate.reload(context)
    assert "certificate of before stays in force" in caplog.text
    assert shown() == first
    path.write_bytes(new.read_bytes())
    certificate.reload(context)
    assert shown() != first


def test_files_that_are_no_certificate_are_refused_at_once(certificate: Path, tmp_path: Path) -> None:
    """Guards: https that fails at the first client; OpenSSL asking the terminal for a password."""
    import subprocess

    locked = tmp_path / "locked.key"
    command = ["openssl", "genpkey", "-algorithm", "RSA", "-aes256", "-pass", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    other = made_for("DNS:other.test", tmp_path)
    for chain, key in (
        (str(tmp_path / "nowhere"), ""),
        (__file__, ""),
        (str(certificate), str(locked)),
        (str(certificate), str(other)),
        ("", str(certificate)),
    ):
        with pytest.raises(SettingsError, match="--tls-cert"):
            certificate_of(chain, key)
    assert certificate_of("", "") is None


def test_clients_that_stall_are_cut_off_over_tls_too(certificate: Path, checkpoint: Path) -> None:
    """Guards: buffers of TLS that nobody counts, and timers that see none of what is unread."""
    options = settings(
        model=(f"m={checkpoint}",),
        random_layer=("tall=200000x32",),
        tls_cert=str(certificate),
        stall_s=1,
        max_queue_bytes=40_000_000,
    )
    big = request(*message(torch.ones(40, 32)), path="/v2/models/tall/infer")  # 32 MB
    with serving(options) as served:
        address = ("127.0.0.1", served.port)
        with (
            socket.create_connection(address, timeout=20) as plain,
            trusting(certificate).wrap_socket(plain, server_hostname="localhost") as link,
        ):
            link.sendall(GOOD[:-1])
            answer = answers(link, 1)[0]
            assert statuses([answer]) == [408]
        with (
            socket.create_connection(address, timeout=20) as plain,
            trusting(certificate).wrap_socket(plain, server_hostname="localhost") as link,
        ):
            link.sendall(big)
            until(lambda: served.engine.held.unread > 8_000_000, "the answer is not counted")
            until(lambda: served.engine.held.unread == 0, "the answer is kept for ever")
            until(lambda: served.lane.connections == 0, "the connection is kept for ever")
