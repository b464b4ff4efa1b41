"""From a request to its reply: `Transport` is the seam, `HTTPTransport` a pool of connections behind it."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from .connection import Closed, Connection, Deadline
from .errors import ConnectionFailed, TimedOut
from .http1 import Reply, Request
from .url import Url

if TYPE_CHECKING:
    import ssl


class Transport(Protocol):
    def send(self, request: Request, timeout: float | None) -> Reply:
        """The reply, whatever its status; `timeout` in seconds for all of it. Errors: `TransportError`,
        `WireError`."""
        ...

    def close(self) -> None: ...


class Busy(TimeoutError):
    """The time passed in the wait for a connection, before anything was sent."""


class HTTPTransport:
    """Keep-alive connections to one server, at most `max_connections` at a time; safe to use from threads.

    A connection that the server closed between two requests is replaced, once a call, by a fresh one. What
    must not be repeated goes over a fresh one at once.
    """

    def __init__(self, url: Url, max_connections: int) -> None:
        self._url = url
        self._pool = _Pool(max_connections)
        self._tls = _tls_context() if url.scheme == "https" else None

    def send(self, request: Request, timeout: float | None) -> Reply:
        deadline = Deadline(timeout)
        what = f"{request.method} {self._url.scheme}://{self._url.authority}{request.path}"
        try:
            with self._pool.slot(deadline):
                return self._send(request, deadline)
        except TimeoutError as error:
            if timeout is None or error.errno is not None:  # the system's own, for a host that is not there
                raise ConnectionFailed(f"{what}: {_reason(error)}") from error
            busy = f"; {error}" if isinstance(error, Busy) else ""
            raise TimedOut(f"{what}: no complete answer within {timeout:g} s{busy}") from error
        except OSError as error:
            raise ConnectionFailed(f"{what}: {_reason(error)}") from error

    def close(self) -> None:
        self._pool.close()

    def _send(self, request: Request, deadline: Deadline) -> Reply:
        idle = self._pool.take()
        if idle is not None and not request.repeatable:
            idle.close()
        elif idle is not None:
            try:
                return self._exchange(idle, request, deadline)
            except Closed:
                pass  # between the look at it and the request
        return self._exchange(self._connect(deadline), request, deadline)

    def _exchange(self, connection: Connection, request: Request, deadline: Deadline) -> Reply:
        try:
            reply = connection.exchange(request, deadline)
        except BaseException:
            connection.close()
            raise
        self._pool.put(connection)
        return reply

    def _connect(self, deadline: Deadline) -> Connection:
        sock = socket.create_connection((self._url.host, self._url.port), deadline.left())
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._url.host)
            return Connection(sock, tls=self._tls is not None)
        except BaseException:
            sock.close()
            raise


class _Pool:
    """Idle connections, the one used last first, and a slot for each that may be open."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: list[Connection] = []
        self._closed = False
        self._slots = threading.Semaphore(size)
        # A client that is dropped without close() leaves no socket for the garbage collector to warn about.
        weakref.finalize(self, _close_all, self._idle)
        _POOLS.add(self)

    @contextmanager
    def slot(self, deadline: Deadline) -> Iterator[None]:
        if self._closed:
            raise ConnectionError("this client has been closed; make a new one")
        if not self._slots.acquire(timeout=deadline.left()):
            raise Busy(f"all of the client's connections ({self._size}) were in use")
        try:
            yield
        finally:
            self._slots.release()

    def take(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if connection.is_idle():
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            _close_all(self._idle)

    def close(self) -> None:
        self._closed = True
        _close_all(self._idle)

    def reset_after_fork(self) -> None:
        """The child has its own slots, and leaves the parent's connections to the parent."""
        self._slots = threading.Semaphore(self._size)
        _close_all(self._idle)


def _close_all(idle: list[Connection]) -> None:
    while idle:
        try:
            idle.pop().close()
        except IndexError:  # another thread was faster
            return


_POOLS: weakref.WeakSet[_Pool] = weakref.WeakSet()


def _reset_pools() -> None:
    for pool in list(_POOLS):
        pool.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_pools)


def _tls_context() -> ssl.SSLContext:
    import ssl

    return ssl.create_default_context()


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused; does a server listen there?"
    return str(error) or type(error).__name__
