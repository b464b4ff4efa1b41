"""infer as a bare ASGI endpoint: for what `connection` does not take, and for an app mounted elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gemmwire import wire
from gemmwire.wire import WireError

from .backlog import Answer, Item
from .body import ClientLeft, Receive, declared_length, decoded, most_inflated, read_body
from .call import Call
from .errors import EngineError
from .held import Coming
from .infer import (
    HEADER_LENGTH,
    PARSE_ELSEWHERE_FROM,
    Headers,
    Infer,
    Reply,
    encodes_elsewhere,
    error_reply,
    joined,
    refuse_repeated,
    tensor_offset,
)
from .layer import Layer

log = logging.getLogger("gemmwire.http")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_WATCH_AFTER_S = 0.02


class InferEndpoint:
    """POST /v2/models/{layer}[/versions/{version}]/infer; the names are in scope["path_params"]."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        visit = _Visit()
        try:
            if len(headers) != len(scope["headers"]):
                refuse_repeated(scope["headers"])
            reply = await self._answer(scope["path_params"], headers, receive, visit)
        except ClientLeft:
            self._infer.traffic.left += 1
            return
        except (WireError, EngineError) as error:
            reply = error_reply(error, headers)
        except Exception as error:  # a fault of ours is one request's 500, never the connection's end
            log.exception("infer failed")
            reply = error_reply(error, headers)
        self._infer.traffic.finished(
            visit.layer, reply.status, reply.reason, headers, visit.began, visit.item
        )
        del visit  # it holds x, and the client may be slow to read y
        await send_reply(send, reply, headers)

    async def _answer(self, path: dict[str, str], headers: Headers, receive: Receive, visit: _Visit) -> Reply:
        layer = visit.layer = self._infer.layer(path["layer"], path.get("version"))
        with self._infer.held.coming() as coming:
            call = await self._read(headers, receive, layer, coming)
        answer = await self._compute(call, layer, receive, visit) if call.rows else None
        if encodes_elsewhere(call, layer):
            return await asyncio.to_thread(self._infer.reply, call, layer, answer, path.get("version"))
        return self._infer.reply(call, layer, answer, path.get("version"))

    async def _read(self, headers: Headers, receive: Receive, layer: Layer, coming: Coming) -> Call:
        limit = self._infer.limits.body_bytes
        declared = declared_length(headers, limit)
        body = await read_body(receive, declared, limit, tensor_offset(headers), coming.grow)
        encoding = headers.get(b"content-encoding")
        if encoding is not None:
            coming.grow(most_inflated(len(body), limit))
            body = await asyncio.to_thread(decoded, body, encoding, limit)
        length = wire.header_length(headers.get(HEADER_LENGTH), len(body))
        if (len(body) if length is None else length) < PARSE_ELSEWHERE_FROM:
            return self._infer.call(body, headers, layer)
        return await asyncio.to_thread(self._infer.call, body, headers, layer)

    async def _compute(self, call: Call, layer: Layer, receive: Receive, visit: _Visit) -> Answer:
        waiting = _Waiting(receive)
        item = visit.item = self._infer.submit(call, layer, waiting.done, waiting.watch_soon)
        try:
            return await waiting.answer
        finally:
            if not item.done:
                item.leave()  # this task was cancelled: the server stops
            waiting.stop_watching()


class _Visit:
    """What one request has come to."""

    def __init__(self) -> None:
        self.began = time.monotonic_ns()
        self.layer: Layer | None = None
        self.item: Item | None = None


class _Waiting:
    """A request whose answer is awaited, and whose client may leave meanwhile."""

    def __init__(self, receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self.answer: asyncio.Future[Answer] = self._loop.create_future()

    def done(self, item: Item) -> None:
        if self.answer.done():
            return
        if isinstance(item.outcome, Exception):
            self.answer.set_exception(item.outcome)
        elif item.outcome is not None:
            self.answer.set_result(item.outcome)

    def watch_soon(self, item: Item) -> None:
        """Notice a client that leaves; most answers are there sooner than that would pay off."""
        self._loop.call_later(_WATCH_AFTER_S, self._watch, item)

    def stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # a cycle, which would keep the answer until the collector comes

    def _watch(self, item: Item) -> None:
        if not self.answer.done():
            self._watcher = self._loop.create_task(self._until_left(item))

    async def _until_left(self, item: Item) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        item.leave()
        if not self.answer.done():
            self.answer.set_exception(ClientLeft())


async def send_reply(send: Send, reply: Reply, headers: Headers) -> None:
    fields = [(name.encode(), value.encode()) for name, value in reply.fields(headers).items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": fields})
    buffers = joined(reply.buffers, wire.buffers_size(reply.buffers))
    last = len(buffers) - 1
    for index, buffer in enumerate(buffers):
        await send({"type": "http.response.body", "body": buffer, "more_body": index < last})
