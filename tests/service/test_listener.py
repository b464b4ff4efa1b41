"""The listening socket: what it is bound to, and how a client is told to reach it."""

from __future__ import annotations

import socket

import pytest

from gemmwire_service.errors import SettingsError
from gemmwire_service.listener import bind, is_loopback, url


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
