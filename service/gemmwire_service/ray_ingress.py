"""One URL and one list of layers for parts that each have some of them: requests go on by the layer's name.

The body of a request or an answer is passed on as it is. What concerns no single layer is asked of all parts
and put together; what would be one part's view of itself is not there.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from gemmwire.wire import WireError

from .body import ClientLeft, declared_length, read_body
from .errors import EngineError
from .ray_replica import Asked, Told, path_of, refuse

_LAYER = re.compile(r"/v2/(?:models|repository/models)/(?P<layer>[^/]+)(?:/.*)?")
_INDEX, _STATS, _READY = "/v2/repository/index", "/v2/models/stats", "/v2/health/ready"
_SAME = re.compile(r"/v2|/v2/health/live|/docs|/openapi\.json|/docs/.*")  # every part answers the same


class Part(Protocol):
    """A deployment that has some of the layers."""

    async def layers(self) -> list[str]: ...

    async def ask(self, asked: Asked) -> Told: ...


class Distributor:
    """The ASGI app. `max_body` bounds the bodies that are passed on."""

    def __init__(self, parts: Sequence[Part], max_body: int) -> None:
        self._parts = parts
        self._max_body = max_body
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
            headers = dict(scope["headers"])
            length = declared_length(headers, self._max_body)
            body = await read_body(receive, length, self._max_body, 0)
            asked = Asked(
                scope["method"], path_of(scope), scope["query_string"], list(scope["headers"]), bytes(body)
            )
            told = await self._answer(asked)
        except ClientLeft:
            return None
        except (WireError, EngineError) as error:
            return await refuse(scope, send, error)
        await send({"type": "http.response.start", "status": told.status, "headers": told.headers})
        return await send({"type": "http.response.body", "body": told.body})

    async def _answer(self, asked: Asked) -> Told:
        """Errors: WireError, NotReady."""
        if asked.path in (_INDEX, _STATS, _READY):
            return merged(asked.path, await self._ask_all(asked))
        if _SAME.fullmatch(asked.path):
            return await self._parts[0].ask(asked)
        match = _LAYER.fullmatch(asked.path)
        if match is None:
            raise _no_route(asked)
        part = self._part_of.get(match["layer"])
        if part is None:
            raise self._unknown(match["layer"])
        return await part.ask(asked)

    async def _ask_all(self, asked: Asked) -> list[Told]:
        return list(await asyncio.gather(*(part.ask(asked) for part in self._parts)))

    def _unknown(self, layer: str) -> WireError:
        known = sorted(self._part_of)
        shown = ", ".join(known[:5]) + (f", ... ({len(known)} in all)" if len(known) > 5 else "")
        return WireError(
            "layer_unknown",
            f"There is no layer {layer[:120]!r}; the layers are {shown}. POST {_INDEX} lists them",
            status=404,
            expected=known[:5],
            got=layer[:120],
        )


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


def _no_route(asked: Asked) -> WireError:
    return WireError(
        "route_unknown",
        f"There is no route {asked.method} {asked.path[:200]} over the parts of a partition; /docs lists "
        "what each part has, and Ray's own metrics and dashboard show the parts",
        status=404,
    )
