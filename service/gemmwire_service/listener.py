"""The listening socket."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from .errors import SettingsError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Bind before anything is loaded, so that a taken port is told at once and port 0 has a number to print.

    Errors: SettingsError.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise _refused(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may be bound to one port until one of them listens, and loading takes a while.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(host, port, error) from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    address = ip_address(listener.getsockname()[0].partition("%")[0])
    return address.is_loopback


def url(listener: socket.socket, host: str) -> str:
    """Where a client on this machine reaches the listener."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def _refused(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"Cannot bind {host}:{port} ({error.strerror or error}); choose another with --host and --port",
        got=f"{host}:{port}",
    )
