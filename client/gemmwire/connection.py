"""One connection: a request out, scattered over its buffers, and the answer in, its body into one buffer."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress

from . import http1
from .deadline import Deadline
from .http1 import Reply, Request
from .incoming import Closed, Incoming, Receiving


class Connection:
    """Errors are those of sockets, and `WireError` for an answer that cannot be read."""

    def __init__(self, sock: socket.socket, *, tls: bool = False) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Without a timeout of its own: Python would poll before each call, and set it anew each time.
        sock.settimeout(None if tls else 0)
        self._socket = sock
        self._tls = tls
        self._readable = Readable(sock)
        self._incoming = Incoming()
        self._pending: list[memoryview] = []  # of the request under way
        self._failure: OSError | None = None
        self.reusable = True

    def exchange(self, request: Request, deadline: Deadline) -> Reply:
        """Send the request and read its answer, which may come before all of the request has been taken."""
        self.send(request, deadline)
        return self.receive(deadline)

    def send(self, request: Request, deadline: Deadline) -> None:
        """The first half of `exchange`: until all of it is taken, or an answer begins to come."""
        self.reusable = False
        self._pending = http1.message(request)
        self._failure = None
        self._send(deadline)

    def receive(self, deadline: Deadline) -> Reply:
        """The second half of `exchange`."""
        try:
            reply = self._feed(self._incoming.reply(), deadline)
        except Closed as closed:
            raise closed from (self._failure or closed.__cause__)
        self.reusable = self._incoming.reusable and not (self._pending or self._failure)
        return reply

    def _feed(self, receiving: Receiving[Reply], deadline: Deadline) -> Reply:
        target = next(receiving)
        while True:
            try:
                target = receiving.send(self._receive(target, deadline))
            except StopIteration as complete:
                reply: Reply = complete.value
                return reply
            except ConnectionError as error:
                receiving.throw(error)  # which knows whether anything of the answer had come
            if self._pending:
                self._send(deadline)

    def is_idle(self) -> bool:
        """False once the server has closed this end, or sent something that nobody asked for."""
        return not self._readable.within(0)

    def close(self) -> None:
        self._socket.close()

    def _send(self, deadline: Deadline) -> None:
        try:
            self._pending = self._send_pending(deadline)
        except ConnectionError as error:
            # The server has closed, but it may have said why.
            self._pending, self._failure = [], error

    def _send_pending(self, deadline: Deadline) -> list[memoryview]:
        """-> what was not sent, because the server answers first."""
        rest = self._pending
        while rest:
            if self._tls:
                self._socket.settimeout(deadline.left())
                self._socket.sendall(rest.pop(0))
                continue
            with suppress(BlockingIOError):  # the server takes no more for now
                rest = _drop(rest, self._send_some(rest))
            if rest and _wait(self._socket, deadline.left()):
                return rest
        return rest

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        if hasattr(self._socket, "sendmsg"):
            return self._socket.sendmsg(buffers)
        return self._socket.send(buffers[0])

    def _receive(self, target: memoryview, deadline: Deadline) -> int:
        if self._tls:
            self._socket.settimeout(deadline.left())
            return self._socket.recv_into(target)
        while True:
            if not self._readable.within(deadline.left()):
                raise TimeoutError
            try:
                return self._socket.recv_into(target)
            except BlockingIOError:
                continue  # what came was not for the program


def _drop(buffers: Sequence[memoryview], sent: int) -> list[memoryview]:
    """The buffers without their first `sent` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [buffer[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


class Readable:
    """Whether a socket can be read, asked of one poll object again and again."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            self._poll.register(sock, select.POLLIN)

    def within(self, seconds: float | None) -> bool:
        """Wait for so long at most; None: for ever."""
        if self._poll is None:
            return bool(select.select([self._socket], [], [], seconds)[0])
        return bool(self._poll.poll(None if seconds is None else seconds * 1000))


def _wait(sock: socket.socket, seconds: float | None) -> bool:
    """Wait until the socket can be read or written; whether it can be read."""
    if not hasattr(select, "poll"):
        readable, _, _ = select.select([sock], [sock], [], seconds)
        return bool(readable)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    events = poll.poll(None if seconds is None else seconds * 1000)
    return any(event & ~select.POLLOUT for _, event in events)
