"""The container's health check: where it asks, what it makes of the answer, and that it is cheap."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from certificates import made_for
from gemmwire_service import healthcheck
from gemmwire_service.healthcheck import Unhealthy, check, connection, main
from gemmwire_service.listener import bind, unix_listener, url
from gemmwire_service.settings import Settings
from serving import Served, serving, settings

READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
LOADING = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"


@contextmanager
def answering(listener: socket.socket, answer: bytes) -> Iterator[list[bytes]]:
    """One answer to whoever connects -> the requests that came."""
    heard: list[bytes] = []

    def serve() -> None:
        link, _ = listener.accept()
        with link:
            heard.append(link.recv(65536))
            link.sendall(answer)

    thread = Thread(target=serve, daemon=True)
    thread.start()
    yield heard
    thread.join(5)


def test_a_service_that_is_ready_is_healthy(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMWIRE_PORT", str(server.port))
    assert main([]) == 0
    assert main(["--live"]) == 0


def test_a_service_that_loads_is_alive_and_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: traffic to a container that answers 503, and a restart of one that is only slow to load."""
    with bind("127.0.0.1", 0) as listener:
        monkeypatch.setenv("GEMMWIRE_PORT", str(listener.getsockname()[1]))
        with answering(listener, LOADING) as heard:
            assert main([]) == 1
        assert heard[0].startswith(b"GET /v2/health/ready ")
        with answering(listener, READY) as heard:
            assert main(["--live"]) == 0
        assert heard[0].startswith(b"GET /v2/health/live ")
    assert "answers 503: the service is not ready" in capsys.readouterr().err


def test_it_asks_at_the_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with unix_listener(path) as listener, answering(listener, READY) as heard:
        check(healthcheck.READY, {"GEMMWIRE_UDS": path, "GEMMWIRE_PORT": "9"})
    assert heard


def test_it_speaks_tls_where_the_service_does(tmp_path: Path) -> None:
    """Guards: a container that is never healthy because its certificate is for another name."""
    path = made_for("DNS:gemm.test", tmp_path)
    with serving(settings(random_layer=("r=8x32",), tls_cert=str(path))) as served:
        check(healthcheck.READY, {"GEMMWIRE_PORT": str(served.port), "GEMMWIRE_TLS_CERT": str(path)})
        with pytest.raises(Unhealthy):
            check(healthcheck.READY, {"GEMMWIRE_PORT": str(served.port)})


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "::1", "::"])
def test_it_asks_where_the_service_says_that_it_is(host: str) -> None:
    """Guards: a check that connects to 0.0.0.0, which is no address of anything on some systems."""
    try:
        listener = bind(host, 0)
    except Exception:
        pytest.skip(f"this machine cannot bind {host}")
    with listener:
        asked = connection({"GEMMWIRE_HOST": host, "GEMMWIRE_PORT": str(listener.getsockname()[1])})
        shown = f"[{asked.host}]" if ":" in asked.host else asked.host
        assert f"http://{shown}:{asked.port}" == url(listener, host)


def test_without_variables_it_asks_where_the_service_listens_by_default() -> None:
    """Guards: a default of the service that changes alone."""
    fields = Settings.model_fields
    assert (fields["host"].default, fields["port"].default) == (healthcheck.HOST, healthcheck.PORT)


@pytest.mark.parametrize("port", ["0", "eight", "65536", "-1", ""])
def test_a_port_that_cannot_be_asked_at_is_told(port: str) -> None:
    with pytest.raises(Unhealthy, match="a fixed port, 1 to 65535"):
        connection({"GEMMWIRE_PORT": port})


def test_nobody_listening_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unhealthy, match=f"no answer from 127.0.0.1:{port}: ConnectionRefusedError"):
        check(healthcheck.READY, {"GEMMWIRE_PORT": str(port)})


def test_an_answer_that_does_not_come_ends_the_check() -> None:
    """Guards: a check that the container engine kills, so that nobody is told what was wrong."""
    with bind("127.0.0.1", 0) as listener, pytest.raises(Unhealthy, match="no answer"):
        check(healthcheck.READY, {"GEMMWIRE_PORT": str(listener.getsockname()[1])}, timeout=0.05)


def test_an_answer_that_is_no_http_is_told() -> None:
    with (
        bind("127.0.0.1", 0) as listener,
        answering(listener, b"hello\r\n\r\n"),
        pytest.raises(Unhealthy, match="BadStatusLine"),
    ):
        check(healthcheck.READY, {"GEMMWIRE_PORT": str(listener.getsockname()[1])})


def test_an_argument_that_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: status 2, which container engines reserve."""
    assert main(["--port", "9"]) == 1
    assert "usage" in capsys.readouterr().err
