"""The listening socket: what it is bound to, and how a client is told to reach it."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from gemmwire_service.errors import SettingsError
from gemmwire_service.listener import allow_files, bind, is_loopback, unix_listener, url


@pytest.mark.parametrize(
    ("host", "loopback", "shown"),
    [("127.0.0.1", True, "127.0.0.1"), ("localhost", True, "localhost"), ("0.0.0.0", False, "127.0.0.1")],
)
def test_a_bound_socket_says_where_it_is(host: str, loopback: bool, shown: str) -> None:
    with bind(host, 0) as listener:
        port = listener.getsockname()[1]
        assert (is_loopback(listener), url(listener, host)) == (loopback, f"http://{shown}:{port}")


def test_an_ipv6_address_goes_into_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = bind("::1", 0)
    except SettingsError:
        pytest.skip("this machine has no IPv6 loopback address")
    with listener:
        assert url(listener, "::1") == f"http://[::1]:{listener.getsockname()[1]}"
        assert is_loopback(listener)


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_an_address_that_is_not_here_is_refused_by_name(host: str) -> None:
    with pytest.raises(SettingsError, match=host):
        bind(host, 8000)


def test_a_port_that_another_server_still_loads_behind_is_taken() -> None:
    """Guards: two servers that both say ready, of which one never gets a request."""
    with bind("127.0.0.1", 0) as first, pytest.raises(SettingsError, match="Cannot bind"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_unix_socket_is_for_the_owner_and_the_group_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_listener(str(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert path.stat().st_mode & 0o777 == 0o660
    assert not path.exists()


def test_a_unix_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with unix_listener(str(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_unix_socket_of_a_server_that_runs_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with (
        unix_listener(path),
        pytest.raises(SettingsError, match="another server listens"),
        unix_listener(path),
    ):
        pass


def test_the_socket_of_a_later_server_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with unix_listener(str(path)):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@pytest.mark.parametrize(
    ("name", "why"),
    [("file", "no socket"), ("missing/s", "No such file"), ("x" * 120, "too long")],
    ids=["file", "no-folder", "too-long"],
)
def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(SettingsError, match=why), unix_listener(str(tmp_path / name)):
        pass
    assert (tmp_path / "file").read_text() == "precious"


def test_as_many_files_are_allowed_as_connections_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: clients that the system drops without a word, below the service's own bound."""
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    allow_files(1000)
    assert limits == [(1024, 4096)]
    allow_files(2000)
    assert limits[-1] == (2000, 4096)
    assert not caplog.text
    allow_files(5000)
    assert limits[-1] == (4096, 4096)
    assert "904 fewer than --max-connections takes" in caplog.text
