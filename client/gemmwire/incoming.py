"""The answer to a request as its bytes come, without I/O: the same for a blocking socket and an event loop.

`Incoming.reply()` is a generator. It yields the memory that the next bytes go to and is sent how many came, 0
for the end of the connection, until it returns the answer. A body of known length is received in place.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from . import http1
from .http1 import Head, Reply

T = TypeVar("T")
Receiving = Generator[memoryview, int, T]


class Closed(ConnectionError):
    """The connection ended before the first byte of an answer."""


class Incoming:
    """What comes over one connection, answer after answer.

    Errors: ConnectionError where the connection ends too soon, `WireError` for an answer that cannot be read.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(http1.MAX_HEAD)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._framed = False

    @property
    def reusable(self) -> bool:
        """Whether the connection goes on behind the last answer, and nothing has come after that."""
        return self._framed and self._start == self._end

    def reply(self) -> Receiving[Reply]:
        """The next answer; those in front of it that say only that it will come are dropped."""
        self._framed = False
        head = yield from self._head()
        while head.status < 200:
            head = http1.read_head((yield from self._until(b"\r\n\r\n")))
        body = yield from self._body(head)
        self._framed = head.keep_alive and (head.chunked or head.length is not None)
        return Reply(head.status, head.headers, body)

    def _head(self) -> Receiving[Head]:
        try:
            return http1.read_head((yield from self._until(b"\r\n\r\n")))
        except ConnectionError as error:
            if self._end:
                raise
            raise Closed("the server closed the connection without an answer") from error

    def _body(self, head: Head) -> Receiving[bytearray]:
        if head.length is not None:
            body = _memory(head.length)
            yield from self._into(memoryview(body))
            return body
        return (yield from self._chunks() if head.chunked else self._rest())

    def _chunks(self) -> Receiving[bytearray]:
        body = bytearray()
        while size := http1.chunk_size((yield from self._until(b"\r\n"))):
            http1.refuse_large(len(body) + size)
            chunk = _memory(size)
            yield from self._into(memoryview(chunk))
            body += chunk
            if (yield from self._until(b"\r\n")):
                raise http1.invalid("a chunk is longer than it says")
        while (yield from self._until(b"\r\n")):
            pass  # trailers, of no use here
        return body

    def _rest(self) -> Receiving[bytearray]:
        body = self._buffer[self._start : self._end]
        self._start = self._end = 0
        while size := (yield self._view):
            body += self._view[:size]
            http1.refuse_large(len(body))
        return body

    def _into(self, target: memoryview) -> Receiving[None]:
        got = min(len(target), self._end - self._start)
        target[:got] = self._view[self._start : self._start + got]
        self._start += got
        while got < len(target):
            size = yield target[got:]
            if not size:
                raise ConnectionError(f"the server closed the connection after {got} of {len(target)} bytes")
            got += size

    def _until(self, mark: bytes) -> Receiving[bytes]:
        """The bytes in front of the next `mark`, which is taken too."""
        if self._start == self._end:
            self._start = self._end = 0
        while (at := self._buffer.find(mark, self._start, self._end)) < 0:
            if self._start:
                self._buffer[: self._end - self._start] = self._buffer[self._start : self._end]
                self._start, self._end = 0, self._end - self._start
            if self._end == len(self._buffer):
                raise http1.invalid(f"its head, or a line in it, has more than {len(self._buffer)} bytes")
            size = yield self._view[self._end :]
            if not size:
                raise ConnectionError("the server closed the connection in the middle of an answer's head")
            self._end += size
        taken = bytes(self._view[self._start : at])
        self._start = at + len(mark)
        return taken


def _memory(size: int) -> bytearray:
    """Errors: `WireError` where there is not so much of it."""
    try:
        return bytearray(size)
    except MemoryError:
        raise http1.invalid(f"it announces {size} bytes, for which there is no memory here") from None
