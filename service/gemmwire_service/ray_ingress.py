"""One URL and one list of layers for parts that each have some of them: requests go on by the layer's name.

The body of a request or an answer is passed on as it is. What concerns no single layer is asked of all parts
and put together; what would be one part's view of itself is not there.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from gemmwire.wire import WireError

from .access import Access
from .body import ClientLeft, declared_length, read_body
from .errors import EngineError
from .held import Coming, Held
from .infer import unknown_layer
from .ray_replica import Asked, Fields, Told, path_of, refuse

_LAYER = re.compile(r"/v2/(?:models|repository/models)/(?P<layer>[^/]+)(?:/.*)?")
_INDEX, _STATS, _READY = "/v2/repository/index", "/v2/models/stats", "/v2/health/ready"
_SAME = re.compile(r"/v2|/v2/health/live|/docs|/openapi\.json|/docs/.*")  # every part answers the same


class Part(Protocol):
    """A deployment that has some of the layers."""

    async def layers(self) -> list[str]: ...

    async def ask(self, asked: Asked) -> Told: ...


@dataclass(frozen=True)
class Bounds:
    """Bytes of one body, of one body of weights, and of all that are passed on at one time."""

    body: int
    weights: int
    all: int


class Distributor:
    """The ASGI app. Who may, what fits and where it goes is told from the head, before the body is read."""

    def __init__(self, parts: Sequence[Part], access: Access, bounds: Bounds) -> None:
        self._parts = parts
        self._access = access
        self._bounds = bounds
        self._held = Held(bounds.all)
        self._part_of: dict[str, Part] = {}

    async def find_out(self) -> None:
        """Which part has which layer; that stays as it is."""
        if not self._part_of:
            lists = await asyncio.gather(*(part.layers() for part in self._parts))
            self._part_of = {
                name: part for part, names in zip(self._parts, lists, strict=True) for name in names
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        try:
            told = await self._answer(scope, receive)
        except ClientLeft:
            return None
        except (WireError, EngineError) as error:
            return await refuse(scope, send, error)
        await send({"type": "http.response.start", "status": told.status, "headers": told.headers})
        return await send({"type": "http.response.body", "body": told.body})

    async def _answer(self, scope: Scope, receive: Receive) -> Told:
        """Errors: WireError, EngineError."""
        method, path, headers = scope["method"], path_of(scope), list(scope["headers"])
        refusal = self._access.refuse(method, path, scope["query_string"], headers)
        if refusal is not None:
            raise refusal
        parts = self._whom(method, path)
        with self._held.coming() as coming:  # until it is answered
            body = await self._body(method, headers, receive, coming)
            asked = Asked(method, path, scope["query_string"], headers, body)
            told = await asyncio.gather(*(part.ask(asked) for part in parts))
        return told[0] if len(told) == 1 else merged(path, told)

    def _whom(self, method: str, path: str) -> Sequence[Part]:
        """Errors: WireError."""
        if path in (_INDEX, _STATS, _READY):
            return self._parts
        if _SAME.fullmatch(path):
            return self._parts[:1]
        match = _LAYER.fullmatch(path)
        if match is None:
            raise _no_route(method, path)
        part = self._part_of.get(match["layer"])
        if part is None:
            raise unknown_layer(match["layer"], self._part_of)
        return [part]

    async def _body(self, method: str, headers: Fields, receive: Receive, coming: Coming) -> bytes:
        """Errors: WireError; QueueFull while others take up the room."""
        limit = self._bounds.weights if method == "PUT" else self._bounds.body
        length = declared_length(dict(headers), limit)
        return bytes(await read_body(receive, length, limit, 0, coming.grow))


def merged(path: str, told: Sequence[Told]) -> Told:
    """The answers of all parts as one; where one of them is an error, that."""
    for each in told:
        if each.status != 200:
            return each
    if path == _READY:
        return told[0]
    documents: list[Any] = [json.loads(each.body) for each in told]
    if path == _INDEX:
        document: Any = [entry for entries in documents for entry in entries]
    else:
        document = {"model_stats": [entry for one in documents for entry in one["model_stats"]]}
    body = json.dumps(document).encode()
    return Told(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message: Message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _no_route(method: str, path: str) -> WireError:
    return WireError(
        "route_unknown",
        f"There is no route {method} {path[:200]} over the parts of a partition; /docs lists "
        "what each part has, and Ray's own metrics and dashboard show the parts",
        status=404,
    )
