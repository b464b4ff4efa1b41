"""One connection on an event loop: what `connection` is for a thread.

A protocol of our own, because a round trip of a small request through a bare one takes 120 us, through
asyncio's streams 128, aiohttp 265 and httpx 900 (p50, one client, the server on another core).
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import cast

from . import http1
from .connection import Readable
from .deadline import Deadline
from .errors import WireError
from .http1 import Reply, Request
from .incoming import Closed, Incoming, Receiving

_WRITTEN_AT_ONCE = 256 << 10  # bytes; what a socket does not take is copied by the transport
_JOIN_BELOW = 64 << 10  # one small copy is cheaper than one more system call


class AsyncConnection(asyncio.BufferedProtocol):
    """For one exchange at a time. Errors are those of sockets, and `WireError` for an answer that cannot be
    read."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._readable: Readable
        self._incoming = Incoming()
        self._receiving: Receiving[Reply] | None = None
        self._target = memoryview(bytearray(1))  # for what nobody asked for
        self._answer: asyncio.Future[Reply] | None = None
        self._pending: list[memoryview] = []  # of the request under way
        self._writing = True  # the server takes it
        self.reusable = True
        self.lost: asyncio.Future[None] = self._loop.create_future()  # settled when its socket is closed

    async def exchange(self, request: Request, deadline: Deadline) -> Reply:
        """Send the request and read its answer, which may come before all of the request has been taken."""
        left = deadline.left()
        if self._transport.is_closing():  # between the connection and the request, when nobody was told
            raise Closed("the server closed the connection before the request was sent")
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._answer = answer
        timer = None if left is None else self._loop.call_later(left, self._settle, TimeoutError())
        self.reusable = False
        self._receiving = self._incoming.reply()
        self._target = next(self._receiving)
        self._pending = _pieces(http1.message(request))
        self._write()
        try:
            return await answer
        finally:
            if timer is not None:
                timer.cancel()
            self._answer = self._receiving = None

    def is_idle(self) -> bool:
        """False once the server has closed this end, or sent something that nobody asked for, be it that the
        loop has not heard of it yet."""
        return self.reusable and not self._readable.within(0)

    def close(self) -> None:
        self.reusable = False
        self._pending = []
        if not self._loop.is_closed():
            self._transport.abort()

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._readable = Readable(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if exc is not None:
            self._read_what_came()
        self._advance(exc if isinstance(exc, ConnectionError) else 0)
        # Whatever came of it: nothing more will come.
        self._settle(exc or ConnectionError("the connection was closed"))
        self.lost.set_result(None)

    def eof_received(self) -> None:
        self.reusable = False
        self._advance(0)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target

    def buffer_updated(self, nbytes: int) -> None:
        if self._receiving is None:
            self.close()  # bytes that nobody asked for are not the next answer
        else:
            self._advance(nbytes)

    def pause_writing(self) -> None:
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        self._write()

    # --- the exchange ---

    def _write(self) -> None:
        while self._pending and self._writing and not self._transport.is_closing():
            self._transport.write(self._pending.pop(0))

    def _read_what_came(self) -> None:
        """The server has closed while it was written to, but it may have said why: the loop does not look."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or self._transport.get_extra_info("ssl_object") is not None:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(sock.fileno())) as still_open:
            still_open.setblocking(False)
            while self._receiving is not None and (size := still_open.recv_into(self._target)):
                self._advance(size)

    def _advance(self, received: int | ConnectionError) -> None:
        """So many bytes have come, 0 being the end."""
        if self._receiving is None:
            return
        try:
            if isinstance(received, int):
                self._target = self._receiving.send(received)
            else:
                self._receiving.throw(received)
        except StopIteration as complete:
            self._complete(complete.value)
        except (ConnectionError, WireError) as error:
            self._settle(error)

    def _complete(self, reply: Reply) -> None:
        taken = not self._pending and not self._transport.get_write_buffer_size()
        self.reusable = self._incoming.reusable and taken and not self._transport.is_closing()
        self._settle(reply)

    def _settle(self, outcome: Reply | Exception) -> None:
        self._receiving = None
        if self._answer is None or self._answer.done():
            return
        if isinstance(outcome, Exception):
            self._answer.set_exception(outcome)
        else:
            self._answer.set_result(outcome)


def _pieces(message: list[memoryview]) -> list[memoryview]:
    """Together where that is little, else in slices that leave little to be copied."""
    if sum(map(len, message)) < _JOIN_BELOW:
        return [memoryview(b"".join(message))]
    return [
        buffer[start : start + _WRITTEN_AT_ONCE]
        for buffer in message
        for start in range(0, len(buffer), _WRITTEN_AT_ONCE)
    ]
