"""The hot path from the socket: one client's connection, whose infer requests are taken without ASGI.

A plain infer request (a complete head in one piece, a Content-Length, nothing that asks for more) is read
into one buffer, computed and answered from here, without a task or a coroutine of its own. Everything else
goes to uvicorn's own protocol, byte for byte, and through it to the app. One request at a time is under way
on a connection, whoever has it; what a client sends beyond that waits.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from gemmwire import wire
from gemmwire.wire import WireError

from .backlog import Answer, Item
from .body import aligned
from .call import Call
from .errors import EngineError
from .head import END, START, Head, parse_head
from .infer import Infer, Reply, encodes_elsewhere, error_reply, request_id
from .layer import Layer

log = logging.getLogger("gemmwire.http")

_READ = 256 << 10  # bytes of one read while no body is expected
_LONGEST_HEAD = 8 << 10
_JOIN_BELOW = 64 << 10  # one small copy is cheaper than one more system call


class Lane:
    """What the connections of one server share."""

    def __init__(self, infer: Infer) -> None:
        self.infer = infer
        self.begun = 0  # requests whose head has come and whose answer has not left
        self.alone = False  # the last two requests came from one connection: nobody else's is to be expected
        self._last: Connection | None = None
        self._starts: dict[int, bytes] = {}
        self._fields: list[tuple[bytes, bytes]] = []
        self._gathering = False
        self._gathered: list[tuple[asyncio.Transport, list[wire.Buffer], bool]] = []
        # A read is consumed before the event loop makes the next one, so that one buffer serves them all.
        self.buffer = memoryview(bytearray(_READ))

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

    def begin(self, connection: Connection) -> None:
        self.begun += 1
        self.alone = connection is self._last
        self._last = connection

    def forget(self, connection: Connection) -> None:
        if connection is self._last:
            self._last = None


class _Uvicorn(HttpToolsProtocol):
    """uvicorn's protocol, which can say whether it is between two requests."""

    _in_message = False

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False

    @property
    def idle(self) -> bool:
        return (
            not self._in_message
            and not self.pipeline
            and (self.cycle is None or self.cycle.response_complete)
        )

    def take_over(self) -> None:
        """Another answers the connection's next request; this one's timer must not close it."""
        self._unset_keepalive_if_required()


class _Exchange:
    """One request under way: its body as it comes, then its place at the engine."""

    __slots__ = ("body", "call", "head", "item", "layer", "missing")

    def __init__(self, head: Head, layer: Layer) -> None:
        self.head = head
        self.layer = layer
        self.body = aligned(head.length, head.offset)
        self.missing = head.length
        self.call: Call | None = None
        self.item: Item | None = None

    def rest(self) -> memoryview:
        return self.body[len(self.body) - self.missing :]


class Connection(asyncio.BufferedProtocol):
    def __init__(
        self,
        lane: Lane,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._lane = lane
        self._state = server_state
        self._uvicorn = _Uvicorn(config, server_state, app_state, _loop)
        self._loop = self._uvicorn.loop
        self._keep_alive_s = config.timeout_keep_alive
        self._transport: asyncio.Transport
        self._exchange: _Exchange | None = None
        self._early = b""  # what came of the next request before it could be taken
        self._writing = True  # the client reads its answers
        self._closing = False  # the server wants it closed after this answer
        self._last_active = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._uvicorn.connection_made(self._transport)
        # The server then asks this protocol to shut down, which knows of both kinds of request.
        self._state.connections.discard(self._uvicorn)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._last_active = self._loop.time()
        self._watch_idle(self._keep_alive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._early = b""
        self._lane.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._lane.begun -= 1
            if exchange.item is not None:
                exchange.item.leave()
        self._uvicorn.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writing = False
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        self._writing = True
        self._uvicorn.resume_writing()
        if self._exchange is None and self._early:
            self._take_early()

    def shutdown(self) -> None:
        """Called by the server on its way out: close now, or once the request under way is answered."""
        self._closing = True
        if self._exchange is None:
            self._uvicorn.shutdown()

    def _watch_idle(self, seconds: float) -> None:
        self._idle_timer = self._loop.call_later(seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        """One timer a connection, not one a request."""
        idle_s = self._loop.time() - self._last_active
        if self._exchange is not None or not self._uvicorn.idle or self._uvicorn.timeout_keep_alive_task:
            self._watch_idle(self._keep_alive_s)
        elif idle_s < self._keep_alive_s:
            self._watch_idle(self._keep_alive_s - idle_s)
        else:
            self._transport.close()

    # --- reading ---

    def get_buffer(self, sizehint: int) -> memoryview:
        exchange = self._exchange
        return exchange.rest() if exchange is not None and exchange.missing else self._lane.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._last_active = self._loop.time()
        exchange = self._exchange
        if exchange is None:
            self._receive(self._lane.buffer[:nbytes])
        elif exchange.missing:
            exchange.missing -= nbytes
            if not exchange.missing:
                self._compute(exchange)
        else:
            self._keep(self._lane.buffer[:nbytes])

    def eof_received(self) -> bool:
        """A client that sends no more is taken for gone, as uvicorn does: its work need not be done."""
        return False

    def _receive(self, data: memoryview) -> None:
        """Bytes that came while no request of this path was under way."""
        if not self._writing:
            return self._keep(data)
        if self._uvicorn.idle and data[: len(START)] == START:
            start = bytes(data[:_LONGEST_HEAD])
            end = start.find(END) + len(END)
            head = parse_head(start[:end]) if end >= len(END) else None
            layer = self._admit(head) if head is not None else None
            if head is not None and layer is not None:
                return self._begin(_Exchange(head, layer), data[end:])
        return self._uvicorn.data_received(bytes(data))

    def _admit(self, head: Head) -> Layer | None:
        """The layer, if the body is to be read; where it is not, the ASGI endpoint says why."""
        if head.length > self._lane.infer.limits.body_bytes or self._transport.is_closing():
            return None
        try:
            return self._lane.infer.layer(head.layer, head.version)
        except (WireError, EngineError):
            return None

    def _begin(self, exchange: _Exchange, data: memoryview) -> None:
        self._uvicorn.take_over()
        self._exchange = exchange
        self._lane.begin(self)
        taken = min(len(data), exchange.missing)
        exchange.body[:taken] = data[:taken]
        exchange.missing -= taken
        if len(data) > taken:
            self._keep(data[taken:])
        if not exchange.missing:
            self._compute(exchange)

    def _keep(self, data: memoryview) -> None:
        """Hold what came too early, and read no more until it is its turn."""
        self._early += bytes(data)
        self._transport.pause_reading()

    def _take_early(self) -> None:
        if self._exchange is None and self._writing and not self._transport.is_closing():
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self._receive(memoryview(early))

    # --- answering ---

    def _compute(self, exchange: _Exchange) -> None:
        infer, layer = self._lane.infer, exchange.layer
        try:
            call = exchange.call = infer.call(exchange.body, exchange.head.headers, layer)
            if call.rows:
                exchange.item = infer.submit(call, layer, self._answered)
                return
            reply = infer.reply(call, layer, None, exchange.head.version)
        except Exception as error:
            reply = self._refusal(error, exchange)
        self._finish(exchange, reply)

    def _answered(self, item: Item) -> None:
        """Hears of the item of the exchange under way; `connection_lost` has taken back every other."""
        exchange = self._exchange
        if exchange is None or exchange.call is None:
            return None
        try:
            if not isinstance(item.outcome, Answer):
                raise item.outcome or AssertionError("an item is settled with an outcome")
            if encodes_elsewhere(exchange.call, exchange.layer):
                return self._encode_elsewhere(exchange, exchange.call, item.outcome)
            version = exchange.head.version
            reply = self._lane.infer.reply(exchange.call, exchange.layer, item.outcome, version)
        except Exception as error:
            reply = self._refusal(error, exchange)
        return self._finish(exchange, reply)

    def _encode_elsewhere(self, exchange: _Exchange, call: Call, answer: Answer) -> None:
        arguments = (call, exchange.layer, answer, exchange.head.version)
        encoding = self._loop.run_in_executor(None, self._lane.infer.reply, *arguments)

        def encoded(done: asyncio.Future[Reply]) -> None:
            error = done.exception()
            reply = done.result() if error is None else self._refusal(cast(Exception, error), exchange)
            self._finish(exchange, reply)

        encoding.add_done_callback(encoded)

    def _refusal(self, error: Exception, exchange: _Exchange) -> Reply:
        """A fault of ours is one request's 500, never the connection's end."""
        if not isinstance(error, (WireError, EngineError)):
            log.error("infer failed", exc_info=error)
        return error_reply(error, exchange.head.headers)

    def _finish(self, exchange: _Exchange, reply: Reply) -> None:
        if self._exchange is not exchange:
            return  # the client left while the reply was made
        self._exchange = None
        self._lane.begun -= 1
        self._state.total_requests += 1
        self._last_active = self._loop.time()
        keep_alive = exchange.head.keep_alive and not self._closing
        self._lane.send(
            self._transport, self._message(reply, exchange.head, keep_alive), close=not keep_alive
        )
        if keep_alive and self._early:
            self._loop.call_soon(self._take_early)

    def _message(self, reply: Reply, head: Head, keep_alive: bool) -> list[wire.Buffer]:
        size = wire.buffers_size(reply.buffers)
        fields = "".join([f"{name}: {value}\r\n" for name, value in reply.headers.items()])
        fields += f"content-length: {size}\r\n"
        identity = request_id(head.headers)
        if identity:
            fields += f"x-request-id: {identity}\r\n"
        if not keep_alive:
            fields += "connection: close\r\n"
        start = self._lane.start(reply.status, self._state.default_headers)
        lines = start + f"{fields}\r\n".encode()
        whole: list[wire.Buffer] = [lines, *reply.buffers]
        return [b"".join(whole)] if size < _JOIN_BELOW else whole


def _send(transport: asyncio.Transport, buffers: list[wire.Buffer], close: bool) -> None:
    if len(buffers) == 1:
        transport.write(buffers[0])
    else:
        transport.writelines(buffers)
    if close:
        transport.close()
