"""One connection: a request out, scattered over its buffers, and the answer in, its body into one buffer."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from . import http1
from .http1 import Head, Reply, Request

_BUFFER = http1.MAX_HEAD


class Closed(ConnectionError):
    """The connection ended before the first byte of an answer."""


class Deadline:
    """A point in time for everything that one call waits for; `seconds` None is never."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds until then, as a socket's timeout. Errors: TimeoutError."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class Connection:
    """Errors are those of sockets, and `WireError` for an answer that cannot be read."""

    def __init__(self, sock: socket.socket, *, tls: bool = False) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._tls = tls
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self.reusable = True

    def exchange(self, request: Request, deadline: Deadline) -> Reply:
        """Send the request and read its answer, which may come before all of the request has been taken."""
        self.reusable = False
        body = [memoryview(buffer).cast("B") for buffer in request.body if len(buffer)]
        head = http1.write_head(request, sum(map(len, body)))
        pending: list[memoryview] = [memoryview(head), *body]
        failure: OSError | None = None
        while True:
            try:
                pending = self._send(pending, deadline)
            except ConnectionError as error:
                pending, failure = [], error  # the server has closed, but it may have said why
            answer = self._read_head(deadline, failure)
            if answer.status >= 200:
                break
        received = self._read_body(answer, deadline)
        self.reusable = (
            answer.keep_alive
            and (answer.chunked or answer.length is not None)
            and not (pending or failure)
            and self._start == self._end
        )
        return Reply(answer.status, answer.headers, received)

    def is_idle(self) -> bool:
        """False once the server has closed this end, or sent something that nobody asked for."""
        return not _wait(self._socket, writing=False, seconds=0)

    def close(self) -> None:
        self._socket.close()

    def _send(self, pending: Sequence[memoryview], deadline: Deadline) -> list[memoryview]:
        """-> what was not sent, because the server answered first."""
        rest = list(pending)
        while rest:
            self._socket.settimeout(deadline.left())
            if self._tls:
                self._socket.sendall(rest.pop(0))
                continue
            rest = _drop(rest, self._send_some(rest))
            if rest and _wait(self._socket, writing=True, seconds=deadline.left()):
                return rest
        return rest

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        if hasattr(self._socket, "sendmsg"):
            return self._socket.sendmsg(buffers)
        return self._socket.send(buffers[0])

    def _read_head(self, deadline: Deadline, failure: OSError | None) -> Head:
        try:
            return http1.read_head(self._read_until(b"\r\n\r\n", deadline))
        except ConnectionError as error:
            if self._end:
                raise
            raise Closed("the server closed the connection without an answer") from (failure or error)

    def _read_body(self, head: Head, deadline: Deadline) -> bytearray:
        if head.length is not None:
            body = bytearray(head.length)
            self._read_into(memoryview(body), deadline)
            return body
        return self._read_chunks(deadline) if head.chunked else self._read_rest(deadline)

    def _read_chunks(self, deadline: Deadline) -> bytearray:
        body = bytearray()
        while size := http1.chunk_size(self._read_until(b"\r\n", deadline)):
            http1.refuse_large(len(body) + size)
            chunk = bytearray(size)
            self._read_into(memoryview(chunk), deadline)
            body += chunk
            if self._read_until(b"\r\n", deadline):
                raise http1.invalid("a chunk is longer than it says")
        while self._read_until(b"\r\n", deadline):
            pass  # trailers, of no use here
        return body

    def _read_rest(self, deadline: Deadline) -> bytearray:
        body = self._buffer[self._start : self._end]
        self._start = self._end
        chunk = bytearray(_BUFFER)
        while size := self._receive(memoryview(chunk), deadline):
            body += chunk[:size]
            http1.refuse_large(len(body))
        return body

    def _read_into(self, target: memoryview, deadline: Deadline) -> None:
        got = min(len(target), self._end - self._start)
        target[:got] = self._view[self._start : self._start + got]
        self._start += got
        while got < len(target):
            size = self._receive(target[got:], deadline)
            if not size:
                raise ConnectionError(f"the server closed the connection after {got} of {len(target)} bytes")
            got += size

    def _read_until(self, mark: bytes, deadline: Deadline) -> bytes:
        """The bytes in front of the next `mark`, which is taken too."""
        if self._start == self._end:
            self._start = self._end = 0
        while (at := self._buffer.find(mark, self._start, self._end)) < 0:
            if self._start:
                self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
                self._start, self._end = 0, self._end - self._start
            if self._end == len(self._buffer):
                raise http1.invalid(f"its head, or a line in it, has more than {len(self._buffer)} bytes")
            size = self._receive(self._view[self._end :], deadline)
            if not size:
                raise ConnectionError("the server closed the connection in the middle of an answer's head")
            self._end += size
        taken = bytes(self._view[self._start : at])
        self._start = at + len(mark)
        return taken

    def _receive(self, target: memoryview, deadline: Deadline) -> int:
        self._socket.settimeout(deadline.left())
        return self._socket.recv_into(target)


def _drop(buffers: Sequence[memoryview], sent: int) -> list[memoryview]:
    """The buffers without their first `sent` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [buffer[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


def _wait(sock: socket.socket, *, writing: bool, seconds: float | None) -> bool:
    """Wait until the socket can be read, or, where `writing`, written; whether it can be read."""
    if not hasattr(select, "poll"):
        readable, _, _ = select.select([sock], [sock] if writing else [], [], seconds)
        return bool(readable)
    poll = select.poll()
    poll.register(sock, select.POLLIN | (select.POLLOUT if writing else 0))
    events = poll.poll(None if seconds is None else seconds * 1000)
    return any(event & ~select.POLLOUT for _, event in events)
