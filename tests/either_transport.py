"""The two transports behind one face, so that a test of a rule holds both to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from ssl import SSLContext
from typing import Any, Protocol, TypeVar

from gemmwire.async_transport import AsyncHTTPTransport
from gemmwire.http1 import Reply, Request
from gemmwire.transport import HTTPTransport
from gemmwire.url import parse_url

T = TypeVar("T")

GET = Request("GET", "/v2", {"host": "test"})
LARGE = bytes(32 << 20)  # more than the socket buffers of both ends take


def post(*body: bytes) -> Request:
    return Request("POST", "/infer", {"host": "test"}, body)


class Sending(Protocol):
    def send(self, request: Request, timeout: float | None) -> Reply: ...

    def close(self) -> None: ...


class Make(Protocol):
    def __call__(self, url: str, max_connections: int = 1, tls: SSLContext | None = None) -> Sending: ...


def threads(url: str, max_connections: int = 1, tls: SSLContext | None = None) -> HTTPTransport:
    """The transport for threads, as it is."""
    return HTTPTransport(parse_url(url), max_connections, tls)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Tasks:
    """The transport for tasks, on a loop."""

    def __init__(self, loop: Loop, url: str, max_connections: int, tls: SSLContext | None) -> None:
        self._loop = loop
        self._transport = AsyncHTTPTransport(parse_url(url), max_connections, tls)

    def send(self, request: Request, timeout: float | None) -> Reply:
        return self._loop.run(self._transport.send(request, timeout))

    def close(self) -> None:
        self._loop.run(self._transport.close())
