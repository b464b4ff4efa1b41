"""The listening sockets."""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

from .errors import SettingsError

log = logging.getLogger("gemmwire")

BACKLOG = 2048
_UNIX_MODE = 0o660  # who may connect: the owner and the group


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


def allow_files(count: int) -> None:
    """Raise this process's bound of open files to so many, as far as it may; the log says what is missing.

    Without, the system would refuse connections before the service does, and say nothing to the client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        log.warning(
            "this process may open %d files, %d fewer than --max-connections takes: raise its hard limit "
            "(ulimit -n), or lower --max-connections",
            most,
            count - most,
        )


def is_loopback(listener: socket.socket) -> bool:
    address = ip_address(listener.getsockname()[0].partition("%")[0])
    return address.is_loopback


def url(listener: socket.socket, host: str, scheme: str = "http") -> str:
    """Where a client on this machine reaches the listener."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


@contextmanager
def unix_listener(path: str) -> Iterator[socket.socket]:
    """A listening Unix socket at `path`, and no file there once the block has ended.

    A socket file that nobody listens behind, as a killed server leaves it, is replaced.
    Errors: SettingsError for any other file there, a server that still listens, or a path that cannot be.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, _UNIX_MODE)
        listener.listen(BACKLOG)
    except SettingsError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise _unusable(path, error.strerror or str(error)) from None
    ours = os.stat(path)
    try:
        yield listener
    finally:
        listener.close()
        _unlink(path, ours)


def _remove_stale(path: str) -> None:
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise _unusable(path, "there is a file of that name, which is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        code = probe.connect_ex(path)
    if code != errno.ECONNREFUSED:
        raise _unusable(path, "another server listens there")
    Path(path).unlink()


def _unlink(path: str, ours: os.stat_result) -> None:
    """Remove the file, unless another server has put its own there."""
    try:
        found = os.stat(path)
        if (found.st_ino, found.st_dev) == (ours.st_ino, ours.st_dev):
            Path(path).unlink()
    except OSError:
        pass


def _unusable(path: str, why: str) -> SettingsError:
    return SettingsError(
        f"Cannot listen on the Unix socket {path!r} ({why}); choose another path with --uds, of at most "
        "107 bytes, in a folder that exists",
        got=path,
    )


def _refused(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"Cannot bind {host}:{port} ({error.strerror or error}); choose another with --host and --port",
        got=f"{host}:{port}",
    )
