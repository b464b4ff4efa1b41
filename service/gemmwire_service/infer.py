"""The hot path: POST /v2/models/{layer}[/versions/{version}]/infer, as a bare ASGI endpoint.

A request goes: known layer -> body limit -> body into one buffer -> wire.decode -> checked against the layer
-> engine.submit -> wire.encode. The first two are answered before the body is read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gemmwire import wire
from gemmwire.wire import WireError

from .backlog import Answer, Item
from .body import ClientLeft, Receive, declared_length, decoded, read_body
from .call import DATATYPES, INPUT, Call, read_call, refuse_large_answer, response
from .engine import Engine
from .errors import EngineError
from .layer import Layer

log = logging.getLogger("gemmwire.http")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

TIMEOUT = b"gemmwire-timeout-us"
_HEADER_LENGTH = wire.HEADER_LENGTH.encode()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_WATCH_AFTER_S = 0.02
_JOIN_BELOW = 64 << 10
_PARSE_ON_LOOP_BELOW = 256 << 10
_ENCODE_ON_LOOP_BELOW = 4096  # numbers as JSON


@dataclass(frozen=True)
class Limits:
    body_bytes: int
    json_bytes: int


class InferEndpoint:
    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits
        self._wire_limits = wire.Limits(json_bytes=limits.json_bytes)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        try:
            if len(headers) != len(scope["headers"]):
                _refuse_repeated(scope["headers"])
            reply, buffers = await self._answer(scope["path_params"], headers, receive)
            status = 200
        except ClientLeft:
            return
        except (WireError, EngineError) as error:
            status, reply, buffers = error_reply(error, headers)
        except Exception as error:  # a fault of ours is one request's 500, never the connection's end
            log.exception("infer failed")
            status, reply, buffers = error_reply(error, headers)
        await _send(send, status, reply, buffers, headers)

    async def _answer(
        self, path: dict[str, str], headers: Headers, receive: Receive
    ) -> tuple[dict[str, str], list[wire.Buffer]]:
        self._engine.refuse_unless_ready()
        layer = find_layer(self._engine, path["layer"], path.get("version"))
        request = await self._read(headers, receive, layer)
        call = read_call(request, layer.spec, _timeout(headers))
        refuse_large_answer(call, layer.spec, self._limits.body_bytes, self._limits.json_bytes)
        answer = await self._compute(call, layer, receive) if call.rows else None
        reply = response(call, layer.spec, layer.version, layer.backend.name, answer)
        if call.binary or call.rows * layer.spec.n < _ENCODE_ON_LOOP_BELOW:
            return wire.encode_response(reply, [call.binary])
        return await asyncio.to_thread(wire.encode_response, reply, [False])

    async def _read(self, headers: Headers, receive: Receive, layer: Layer) -> wire.InferRequest:
        limit = self._limits.body_bytes
        declared = declared_length(headers, limit)
        header = headers.get(_HEADER_LENGTH)
        offset = int(header) if header is not None and header.isdigit() and len(header) < 10 else 0
        body = await read_body(receive, declared, limit, offset)
        encoding = headers.get(b"content-encoding")
        if encoding is not None:
            body = await asyncio.to_thread(decoded, body, encoding, limit)
        length = wire.header_length(header, len(body))
        if length == 0:
            return wire.decode_raw_request(body, INPUT, DATATYPES[0], layer.spec.k)
        if (len(body) if length is None else length) < _PARSE_ON_LOOP_BELOW:
            return wire.decode_request(body, length, self._wire_limits)
        return await asyncio.to_thread(wire.decode_request, body, length, self._wire_limits)

    async def _compute(self, call: Call, layer: Layer, receive: Receive) -> Answer:
        item = self._engine.submit(
            layer, call.x, call.rows, call.datatype, call.deadline, partial(_watch_soon, receive)
        )
        try:
            return await item.future
        except asyncio.CancelledError:
            if item.left:
                raise ClientLeft from None
            raise
        finally:
            if item.watcher is not None:
                item.watcher.cancel()
                item.watcher = None  # a cycle, which would keep the answer until the collector comes


def find_layer(engine: Engine, name: str, version: str | None = None) -> Layer:
    """Errors: `layer_unknown`, `version_unknown`, both 404; NotReady while there are no layers at all."""
    layer = engine.layers.get(name)
    if layer is None:
        if not engine.layers:
            engine.refuse_unless_ready()
        known = sorted(engine.layers)
        shown = ", ".join(known[:5]) + (f", ... ({len(known)} in all)" if len(known) > 5 else "")
        raise WireError(
            "layer_unknown",
            f"There is no layer {name[:120]!r}; the layers are {shown}. POST /v2/repository/index lists them",
            status=404,
            expected=known[:5],
            got=name[:120],
        )
    if version is not None and version != str(layer.version):
        raise WireError(
            "version_unknown",
            f"Layer {name!r} is served in version {layer.version}, not {version[:40]!r}; leave the version "
            "out for the current one",
            status=404,
            expected=str(layer.version),
            got=version[:40],
        )
    return layer


def error_reply(error: Exception, headers: Headers) -> tuple[int, dict[str, str], list[wire.Buffer]]:
    """-> (status, headers, body) of an error: the sentence, the code and the two sides."""
    known = isinstance(error, (WireError, EngineError))
    status = error.status if isinstance(error, (WireError, EngineError)) else 500
    document = {
        "error": str(error) if known else "The server failed on this request; its log has the details",
        "code": getattr(error, "code", "internal") if known else "internal",
        "expected": getattr(error, "expected", None),
        "got": getattr(error, "got", None),
        "request_id": request_id(headers),
    }
    reply = {"content-type": "application/json"}
    if status == 503:
        reply["retry-after"] = "1"
    return status, reply, [json.dumps(document, default=str).encode()]


def request_id(headers: Headers) -> str:
    """The caller's x-request-id (or triton-request-id), where it is one that may be echoed."""
    value = headers.get(b"x-request-id") or headers.get(b"triton-request-id")
    if value is None:
        return ""
    return value.decode() if _REQUEST_ID.fullmatch(value) else ""


def _refuse_repeated(headers: list[tuple[bytes, bytes]]) -> None:
    """Errors: `frame_invalid` where a header that says how to read the body comes twice."""
    names = [name for name, _ in headers]
    for name in (_HEADER_LENGTH, b"content-encoding", TIMEOUT):
        if names.count(name) > 1:
            raise WireError(
                "frame_invalid",
                f"Header {name.decode()} came {names.count(name)} times; send it once",
                expected=1,
                got=names.count(name),
            )


def _timeout(headers: Headers) -> int | None:
    value = headers.get(TIMEOUT)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise WireError(
            "request_invalid",
            f"Header {TIMEOUT.decode()} is {value[:40].decode('latin-1')!r}; it must be a whole number of "
            "microseconds",
            expected="microseconds",
        )
    return int(value)


def _watch_soon(receive: Receive, item: Item) -> None:
    """Notice a client that leaves; most answers are there sooner than that would pay off."""
    asyncio.get_running_loop().call_later(_WATCH_AFTER_S, _watch, receive, item)


def _watch(receive: Receive, item: Item) -> None:
    if not item.future.done():
        item.watcher = asyncio.get_running_loop().create_task(_cancel_when_left(receive, item))


async def _cancel_when_left(receive: Receive, item: Item) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    item.left = True
    item.future.cancel()


async def _send(
    send: Send, status: int, reply: dict[str, str], buffers: list[wire.Buffer], headers: Headers
) -> None:
    size = wire.buffers_size(buffers)
    fields = [(name.encode(), value.encode()) for name, value in reply.items()]
    fields.append((b"content-length", b"%d" % size))
    identity = request_id(headers)
    if identity:
        fields.append((b"x-request-id", identity.encode()))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    if size < _JOIN_BELOW:
        # One small copy is cheaper than one more system call.
        await send({"type": "http.response.body", "body": b"".join(buffers)})
        return
    last = len(buffers) - 1
    for index, buffer in enumerate(buffers):
        await send({"type": "http.response.body", "body": buffer, "more_body": index < last})
