"""The hot path from the socket: one client's connection, whose infer requests are taken without ASGI.

A plain infer request (a complete head in one piece, a Content-Length, nothing that asks for more) is read
into one buffer, computed and answered from here, without a task or a coroutine of its own. Everything else
goes to uvicorn's own protocol, byte for byte, and through it to the app. One request at a time is under way
on a connection, whoever has it; what a client sends beyond that waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from gemmwire import wire
from gemmwire.wire import WireError

from .backlog import Answer, Item
from .call import Call
from .errors import ConnectionsFull, Draining, EngineError
from .exchange import Exchange
from .head import END, START, Head, parse_head
from .infer import Reply, encodes_elsewhere, error_reply, joined, request_id
from .lane import Lane
from .layer import Layer
from .patience import Watch
from .pieces import PiecesTransport
from .repeat import Repeat
from .uvicorn_protocol import UvicornProtocol, closing_answer, reply_lines

log = logging.getLogger("gemmwire.http")

_LONGEST_HEAD = 8 << 10
_SURPLUS_S = 1.0  # for a client beyond the bound to send something, so that it hears why it is closed


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
        self._uvicorn = UvicornProtocol(config, server_state, app_state, _loop)
        self._uvicorn.reject = lane.infer.traffic.reject
        self._loop = self._uvicorn.loop
        self._transport: asyncio.Transport
        self._exchange: Exchange | None = None
        self._last: Head | None = None  # of the last request of this path
        self._repeat: Repeat | None = None  # what is known of it, once its head has come twice
        self._early = b""  # what came of the next request before it could be taken
        self._writing = True  # the client reads its answers
        self._closing = False  # the server wants it closed after this answer
        self._surplus = False  # beyond the bound of connections: it is answered so, and closed
        self._unread = 0  # bytes of answers beyond what the transport takes at once
        self._watch = Watch(lane.patience, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        whole = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        by_tls = whole.get_extra_info("sslcontext") is not None
        self._transport = cast(asyncio.Transport, PiecesTransport(whole, self._recount)) if by_tls else whole
        self._uvicorn.connection_made(self._transport)
        # The server then asks this protocol to shut down, which knows of both kinds of request.
        self._state.connections.discard(self._uvicorn)
        self._state.connections.add(self)  # type: ignore[arg-type]
        if self._lane.connect():
            self._look_in(self._lane.patience.stall_s)
        else:
            self._surplus = True
            self._look_in(0 if self._lane.overrun else _SURPLUS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._lane.connections -= not self._surplus
        self._lane.surplus -= self._surplus
        self._count_unread(0)
        if self._timer is not None:
            self._timer.cancel()
        self._early = b""
        self._lane.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._lane.begun -= 1
            self._lane.infer.traffic.left += 1
            self._come(exchange)
            if exchange.item is not None:
                exchange.item.leave()
        self._uvicorn.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writing = False
        self._recount()
        self._uvicorn.pause_writing()

    def resume_writing(self) -> None:
        self._writing = True
        self._count_unread(0)
        self._uvicorn.resume_writing()
        if self._exchange is None and self._early:
            self._take_early()

    def shutdown(self) -> None:
        """Called by the server on its way out: close now, or once the request under way is answered."""
        self._closing = True
        if self._exchange is None:
            self._uvicorn.shutdown()

    def end(self) -> None:
        """Called by the server when its grace is over: what has not come by now is not waited for."""
        exchange = self._exchange
        if exchange is not None and exchange.missing:
            self._closing = True
            error = Draining("The server shuts down, and the request's rest has not come; send it to another")
            self._finish(exchange, self._refusal(error, exchange))
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _recount(self) -> None:
        if not self._writing:
            self._count_unread(self._transport.get_write_buffer_size())

    def _count_unread(self, nbytes: int) -> None:
        self._lane.held.unread += nbytes - self._unread
        self._unread = nbytes

    def _look_in(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """End what its client has let rest: between two requests, in the middle of one, or of an answer.

        One timer a connection, not one a request.
        """
        if self._surplus:
            return self._transport.abort() if self._lane.overrun else self._transport.close()
        now = self._loop.time()
        unread = self._transport.get_write_buffer_size()
        reading = self._watch.reading(now, unread)
        left = reading if unread else self._left(now)
        if left > 0:
            self._look_in(min(left, self._lane.patience.stall_s))
        elif unread:
            self._lane.infer.traffic.reject("answer_unread")
            self._transport.abort()  # closing would wait until all of it is read
        else:
            self._give_up()
        return None

    def _left(self, now: float) -> float:
        """Seconds that the client may let the connection rest from now; endless while it is our turn."""
        exchange, other = self._exchange, self._uvicorn
        if exchange is not None:
            received = exchange.head.length - exchange.missing
            return self._watch.sending(now, exchange.began / 1e9, received) if exchange.missing else math.inf
        if other.awaits_client:
            return self._watch.sending(now, other.began, other.received)
        if other.idle and other.timeout_keep_alive_task is None:  # else it has a timer of its own
            return self._watch.idle(now)
        return math.inf

    def _give_up(self) -> None:
        """Close; where that is in the middle of a request, with an answer that says why."""
        exchange, patience = self._exchange, self._lane.patience
        error = WireError(
            "body_stalled",
            f"Nothing more of the request came for {patience.stall_s:g} seconds, or it came slower than "
            f"{patience.bytes_per_s} bytes a second on the whole; send it again, in one go",
            status=408,
        )
        if exchange is not None:
            self._closing = True
            return self._finish(exchange, self._refusal(error, exchange))
        if self._uvicorn.awaits_client:
            self._lane.infer.traffic.reject(error.code)
        return self._uvicorn.give_up(error)

    def _turn_away(self) -> None:
        error = ConnectionsFull(
            f"{self._lane.most} clients are connected, which is the bound; close connections that are not "
            "used, try again later, or raise --max-connections",
            expected=f"<= {self._lane.most}",
        )
        self._lane.infer.traffic.reject(error.code)
        self._transport.write(closing_answer(error))
        self._transport.close()

    # --- reading ---

    def get_buffer(self, sizehint: int) -> memoryview:
        exchange = self._exchange
        return exchange.rest() if exchange is not None and exchange.missing else self._lane.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._watch.active = self._loop.time()
        exchange = self._exchange
        if self._surplus:
            self._turn_away()
        elif exchange is None:
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
        repeat = self._repeat
        if repeat is not None and repeat.is_in(data) and self._uvicorn.idle:
            layer = self._admit(repeat.head)
            if layer is not None and layer.spec is repeat.spec:
                return self._begin_again(repeat, layer, data)
        if self._lane.takes_infer and self._uvicorn.idle and data[: len(START)] == START:
            start = bytes(data[:_LONGEST_HEAD])
            end = start.find(END) + len(END)
            head = parse_head(start[:end]) if end >= len(END) else None
            layer = self._admit(head) if head is not None else None
            if head is not None and layer is not None:
                return self._begin(Exchange(head, layer), data[end:])
        return self._uvicorn.data_received(bytes(data))

    def _admit(self, head: Head) -> Layer | None:
        """The layer, if the body is to be read; where it is not, the ASGI app says why."""
        if head.length > self._lane.infer.limits.body_bytes or self._transport.is_closing():
            return None
        if not self._lane.access.takes_infer(head.headers) or not self._lane.held.fits(head.length):
            return None
        try:
            return self._lane.infer.layer(head.layer, head.version)
        except (WireError, EngineError):
            return None

    def _begin(self, exchange: Exchange, data: memoryview) -> None:
        self._uvicorn.take_over()
        self._exchange = exchange
        self._lane.begin(self)
        self._lane.held.receiving += exchange.coming
        taken = min(len(data), exchange.missing)
        exchange.body[:taken] = data[:taken]
        exchange.missing -= taken
        if len(data) > taken:
            self._keep(data[taken:])
        if not exchange.missing:
            self._compute(exchange)

    def _begin_again(self, repeat: Repeat, layer: Layer, data: memoryview) -> None:
        """`_begin` and `_compute` of a request that is as the last one was."""
        self._uvicorn.take_over()
        exchange = self._exchange = Exchange(repeat.head, layer, repeat)
        self._lane.begin(self)
        try:
            call = exchange.call = repeat.call_in(data)
            exchange.item = self._lane.infer.submit(call, layer, self._answered)
        except Exception as error:
            self._finish(exchange, self._refusal(error, exchange))

    def _keep(self, data: memoryview) -> None:
        """Hold what came too early, and read no more until it is its turn."""
        self._early += bytes(data)
        self._transport.pause_reading()

    def _take_early(self) -> None:
        ready = self._exchange is None and self._writing and not self._transport.is_closing()
        if ready and self._early:  # else reading may be paused for uvicorn's reasons
            early, self._early = self._early, b""
            self._transport.resume_reading()
            self._receive(memoryview(early))

    # --- answering ---

    def _come(self, exchange: Exchange) -> None:
        """Its body is here, or will not be."""
        self._lane.held.receiving -= exchange.coming
        exchange.coming = 0

    def _compute(self, exchange: Exchange) -> None:
        infer, layer = self._lane.infer, exchange.layer
        self._come(exchange)
        try:
            call = exchange.call = infer.call(exchange.body, exchange.head.headers, layer)
            self._note(exchange, call)
            if call.rows:
                exchange.item = infer.submit(call, layer, self._answered)
                return
            reply = infer.reply(call, layer, None, exchange.head.version)
        except Exception as error:
            reply = self._refusal(error, exchange)
        self._finish(exchange, reply)

    def _note(self, exchange: Exchange, call: Call) -> None:
        """Of a client that sends the same head again, all is kept that its next request may have in common
        with this one; heads that are remembered are one object."""
        head = exchange.head
        again = head is self._last
        self._last = head
        self._repeat = Repeat.of(head, exchange.layer.spec, call, exchange.body) if again else None

    def _answered(self, item: Item) -> None:
        """Hears of the item of the exchange under way; `connection_lost` has taken back every other."""
        exchange = self._exchange
        if exchange is None or exchange.call is None or exchange.call.x is not item.x:
            return None  # of a request that was refused after all, by a fault of ours
        exchange.item = item  # it may come before `submit` has returned it
        try:
            if not isinstance(item.outcome, Answer):
                raise item.outcome or AssertionError("an item is settled with an outcome")
            if exchange.repeats is not None and not self._closing:
                start = self._lane.start(200, self._state.default_headers)
                message = exchange.repeats.message(item.outcome, start)
                return self._send(exchange, [message], keep_alive=True)
            if encodes_elsewhere(exchange.call, exchange.layer):
                return self._encode_elsewhere(exchange, exchange.call, item.outcome)
            version = exchange.head.version
            reply = self._lane.infer.reply(exchange.call, exchange.layer, item.outcome, version)
        except Exception as error:
            reply = self._refusal(error, exchange)
        return self._finish(exchange, reply)

    def _encode_elsewhere(self, exchange: Exchange, call: Call, answer: Answer) -> None:
        arguments = (call, exchange.layer, answer, exchange.head.version)
        encoding = self._loop.run_in_executor(None, self._lane.infer.reply, *arguments)

        def encoded(done: asyncio.Future[Reply]) -> None:
            error = done.exception()
            reply = done.result() if error is None else self._refusal(cast(Exception, error), exchange)
            self._finish(exchange, reply)

        encoding.add_done_callback(encoded)

    def _refusal(self, error: Exception, exchange: Exchange) -> Reply:
        """A fault of ours is one request's 500, never the connection's end."""
        if not isinstance(error, (WireError, EngineError)):
            log.error("infer failed", exc_info=error)
        return error_reply(error, exchange.head.headers)

    def _finish(self, exchange: Exchange, reply: Reply) -> None:
        if self._exchange is not exchange:
            return  # the client left while the reply was made
        keep_alive = exchange.head.keep_alive and not self._closing
        message = self._message(reply, exchange.head, keep_alive)
        self._send(exchange, message, reply.status, reply.reason, keep_alive=keep_alive)

    def _send(
        self,
        exchange: Exchange,
        message: list[wire.Buffer],
        status: int = 200,
        reason: str = "",
        *,
        keep_alive: bool,
    ) -> None:
        self._exchange = None
        self._come(exchange)
        self._lane.begun -= 1
        self._state.total_requests += 1
        self._watch.active = self._loop.time()
        self._lane.send(self._transport, message, close=not keep_alive)
        self._lane.infer.traffic.finished(
            exchange.layer, status, reason, exchange.head.headers, exchange.began, exchange.item
        )
        if keep_alive and self._early:
            self._loop.call_soon(self._take_early)

    def _message(self, reply: Reply, head: Head, keep_alive: bool) -> list[wire.Buffer]:
        start = self._lane.start(reply.status, self._state.default_headers)
        size = wire.buffers_size(reply.buffers)
        lines = reply_lines(size, request_id(head.headers), keep_alive, *reply.headers.items())
        head_lines = start + lines
        return joined([head_lines, *reply.buffers], len(head_lines) + size)
