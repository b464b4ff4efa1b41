"""From a request to its reply: `Transport` is the seam, `HTTPTransport` a pool of connections behind it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from .connection import Connection
from .deadline import Deadline
from .errors import GemmwireError
from .failures import too_slow, transport_error
from .http1 import Reply, Request
from .incoming import Closed
from .pool import Pool
from .url import Url

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")


class Transport(Protocol):
    def send(self, request: Request, timeout: float | None) -> Reply:
        """The reply, whatever its status; `timeout` in seconds for all of it. Errors: `TransportError`,
        `WireError`."""
        ...

    def send_all(
        self, requests: Sequence[Request], timeout: float | None, at_once: int
    ) -> list[Reply | GemmwireError]:
        """The reply to each, or what `send` would raise. `timeout` is for all of them together, and at most
        `at_once` are under way at a time."""
        ...

    def close(self) -> None: ...


class Sent(NamedTuple):
    """A request that has gone out, and the connection that its answer comes by."""

    request: Request
    connection: Connection
    fresh: bool


class HTTPTransport:
    """Keep-alive connections to one server, at most `max_connections` at a time; safe to use from threads.

    A connection that the server closed between two requests is replaced, once a call, by a fresh one. What
    must not be repeated goes over a fresh one at once. `connect_s`: seconds that one may take to be made.
    """

    def __init__(
        self,
        url: Url,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        connect_s: float | None = None,
    ) -> None:
        self.url = url
        self.pool = Pool(max_connections)
        self._tls = tls
        self._connect_s = connect_s

    def send(self, request: Request, timeout: float | None) -> Reply:
        deadline = Deadline(timeout)
        try:
            self.pool.acquire(deadline)
            try:
                return self.finish(self.start(request, deadline), deadline)
            finally:
                self.pool.release()
        except OSError as error:  # TimeoutError is one
            raise transport_error(error, request, self.url, timeout) from error

    def send_all(
        self, requests: Sequence[Request], timeout: float | None, at_once: int
    ) -> list[Reply | GemmwireError]:
        from .window import Window

        with Window(timeout, at_once) as window:
            for request in requests:
                window.add(request, self)
            return window.replies()

    def close(self) -> None:
        self.pool.close()

    def start(self, request: Request, deadline: Deadline) -> Sent:
        """Send by a connection of the pool; the caller holds a slot."""
        idle = self.pool.take()
        if idle is not None and not request.repeatable:
            idle.close()
            idle = None
        if idle is None:
            return self._start_afresh(request, deadline)
        _send(idle, request, deadline)
        return Sent(request, idle, fresh=False)

    def finish(self, sent: Sent, deadline: Deadline) -> Reply:
        """Read the answer, and give the connection back."""
        try:
            reply = sent.connection.receive(deadline)
        except BaseException as error:
            sent.connection.close()
            if sent.fresh or not isinstance(error, Closed):
                raise
        else:
            self.pool.put(sent.connection)
            return reply
        # The connection ended between the look at it and the request.
        return self.finish(self._start_afresh(sent.request, deadline), deadline)

    def _start_afresh(self, request: Request, deadline: Deadline) -> Sent:
        connection = within(self._connect_s, deadline, self._connect)
        _send(connection, request, deadline)
        return Sent(request, connection, fresh=True)

    def _connect(self, deadline: Deadline) -> Connection:
        if self.url.socket:
            return Connection(_unix_socket(self.url.socket, deadline))
        sock = _tcp_socket(self.url.host, self.url.port, deadline)
        try:
            if self._tls is not None:
                sock.settimeout(deadline.left())
                sock = self._tls.wrap_socket(sock, server_hostname=self.url.host)
            return Connection(sock, tls=self._tls is not None)
        except BaseException:
            sock.close()
            raise


def within(seconds: float | None, deadline: Deadline, connect: Callable[[Deadline], T]) -> T:
    """Connect in so many seconds and half of the time at most: the rest is left for another host."""
    if seconds is None:
        return connect(deadline)
    seconds = deadline.part(seconds)
    try:
        return connect(Deadline(seconds))
    except TimeoutError:
        deadline.left()
        raise too_slow(seconds) from None


def _tcp_socket(host: str, port: int, deadline: Deadline) -> socket.socket:
    """By the first address of the host that answers; socket.create_connection would wait anew for each."""
    failure: OSError | None = None
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_connection((str(address[0]), port), deadline.left())
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host!r} has no address")


def _unix_socket(path: str, deadline: Deadline) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no Unix sockets; use the server's http address")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(deadline.left())
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _send(connection: Connection, request: Request, deadline: Deadline) -> None:
    try:
        connection.send(request, deadline)
    except BaseException:
        connection.close()
        raise
