"""A TLS transport that says how much of what it was given has not been read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from gemmwire.wire import Buffer

_PIECE = 256 << 10  # bytes


class PiecesTransport:
    """Writes in pieces, and calls `written` after more than one of them.

    asyncio's TLS encrypts all of one write and hands it to the transport below, where nobody counts it. Only
    what is written once that is full is kept back, counted, and told of by `pause_writing`.
    """

    def __init__(self, transport: asyncio.Transport, written: Callable[[], None]) -> None:
        self._transport = transport
        self._written = written

    def write(self, data: Buffer) -> None:
        if len(data) <= _PIECE:
            self._transport.write(data)
            return
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            self._transport.write(view[start : start + _PIECE])
        self._written()

    def writelines(self, buffers: Iterable[Buffer]) -> None:
        for data in buffers:
            self.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
