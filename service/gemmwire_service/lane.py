"""What the connections of one server share."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gemmwire import wire

from .access import Access
from .infer import Infer
from .patience import Patience

log = logging.getLogger("gemmwire.http")

_READ = 256 << 10  # bytes of one read while no body is expected
_MOST_SURPLUS = 64  # connections beyond the bound that are kept for a moment, to be told


class Lane:
    """The steps of infer, the buffer for reading, and what is to be sent.

    `takes_infer`: from the socket; else all requests go through ASGI, and only connections are seen to here.
    """

    def __init__(
        self, infer: Infer, access: Access, patience: Patience, *, most: int, takes_infer: bool
    ) -> None:
        self.infer = infer
        self.access = access
        self.patience = patience
        self.held = infer.held
        self.takes_infer = takes_infer
        self.most = most
        self.connections = 0
        self.surplus = 0
        self.begun = 0  # requests whose head has come and whose answer has not left
        self.alone = False  # the last two requests came from one connection: nobody else's is to be expected
        self._last: object = None
        self._starts: dict[int, bytes] = {}
        self._fields: list[tuple[bytes, bytes]] = []
        self._gathering = False
        self._gathered: list[tuple[asyncio.Transport, list[wire.Buffer], bool]] = []
        # A read is consumed before the event loop makes the next one, so that one buffer serves them all.
        self.buffer = memoryview(bytearray(_READ))

    def connect(self) -> bool:
        """Whether one more connection is within the bound; both are counted, each until it is lost."""
        if self.connections < self.most:
            self.connections += 1
            return True
        self.surplus += 1
        return False

    @property
    def overrun(self) -> bool:
        return self.surplus > _MOST_SURPLUS

    def begin(self, connection: object) -> None:
        self.begun += 1
        self.alone = connection is self._last
        self._last = connection

    def forget(self, connection: object) -> None:
        if connection is self._last:
            self._last = None

    def start(self, status: int, fields: list[tuple[bytes, bytes]]) -> bytes:
        """The status line and the fields of every answer, which the server replaces once a second."""
        if fields is not self._fields:
            self._starts.clear()
            self._fields = fields
        if status not in self._starts:
            lines = [name + b": " + value + b"\r\n" for name, value in fields]
            self._starts[status] = b"".join([STATUS_LINE[status], *lines])
        return self._starts[status]

    def __enter__(self) -> None:
        """Send nothing until the block ends, then all of it at once.

        A client that is woken by its answer while the next one is still written out goes to sleep again
        before that comes, and waking it costs more than the rest of sending it.
        """
        self._gathering = True

    def __exit__(self, *_: object) -> None:
        self._gathering = False
        gathered, self._gathered = self._gathered, []
        for transport, buffers, close in gathered:
            _send(transport, buffers, close)

    def send(self, transport: asyncio.Transport, buffers: list[wire.Buffer], *, close: bool) -> None:
        if self._gathering:
            self._gathered.append((transport, buffers, close))
        else:
            _send(transport, buffers, close)


def _send(transport: asyncio.Transport, buffers: list[wire.Buffer], close: bool) -> None:
    try:
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)
        if close:
            transport.close()
    except Exception:  # the end of one connection; the others of the batch still get their answers
        log.exception("an answer could not be sent")
        transport.abort()
