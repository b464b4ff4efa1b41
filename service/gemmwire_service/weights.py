"""PUT /v2/repository/models/{layer}/weights: a layer's new weight as the body of a request.

Who may and what fits is told from the headers, before the body is read; `refit` does the rest.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from gemmwire.wire import WireError

from .body import ClientLeft, Receive, read_body
from .engine import Engine
from .errors import QueueFull
from .infer import find_layer
from .layer import Layer
from .openapi import problems
from .protocol import RefitResult, RefitSeconds
from .refit import Refit, Refitted, Source, refuse_version
from .safetensors_body import largest, read_weights
from .shared_refit import SharedRefit

STALL_S = 30.0
SOURCE = "a refit request"
_ETAG = re.compile(r'"?([0-9]{1,18})"?')
_PROBLEMS = problems(400, 404, 408, 409, 411, 413, 415, 500, 503)


def weights_routes(
    engine: Engine, refit: Refit, max_bytes: int, shared: SharedRefit | None = None
) -> APIRouter:
    """`refit` is the engine's one: whatever else replaces weights takes turns with this route.

    With `shared` it is for other servers too, of which one may know of a newer version than this one.
    """
    routes = APIRouter()
    room = Room(max_bytes)

    @routes.put(
        "/v2/repository/models/{layer}/weights",
        summary="Replace a layer's weight in place (refit)",
        response_model=RefitResult,
        responses=_PROBLEMS,
        openapi_extra=_BODY,
    )
    async def put_weights(layer: str, request: Request, response: Response) -> Any:
        engine.refuse_unless_ready()
        found = find_layer(engine, layer)
        version = if_match(request.headers.get("if-match"))
        if shared is None:
            refuse_version(found.name, found.version, version)
        length = _length(request, found, max_bytes)
        try:
            with room.taken(length):
                body = await read_body(_unless_stalled(request.receive), length, length, 0)
                if shared is not None:
                    result = await shared.publish(found, body, version)
                else:
                    source = Source(found, partial(read_weights, body, found.spec), SOURCE)
                    result = await refit.refit(source, version)
        except ClientLeft:
            return Response(status_code=400)  # to nobody
        response.headers["etag"] = f'"{result.version}"'
        return answer(result)

    return routes


class Room:
    """The bytes of bodies that are being received or refitted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Errors: QueueFull while others take it up."""
        if self._used + nbytes > self._size:
            raise QueueFull(
                f"{self._used} bytes of weights are being taken and {nbytes} more pass the bound of "
                f"{self._size}; try again later, or raise --max-weights-bytes",
                expected=f"<= {self._size}",
                got=self._used + nbytes,
            )
        self._used += nbytes
        try:
            yield
        finally:
            self._used -= nbytes


def _unless_stalled(receive: Receive) -> Receive:
    """Errors: 408 where nothing more comes: the bytes that are kept for it are others' too."""

    async def patient() -> MutableMapping[str, Any]:
        try:
            return await asyncio.wait_for(receive(), STALL_S)
        except asyncio.TimeoutError:
            raise WireError(
                "body_stalled",
                f"Nothing more of the body came for {STALL_S:g} seconds; send it again, in one go",
                status=408,
            ) from None

    return patient


def if_match(header: str | None) -> int | None:
    """The version that the caller takes the layer to be in; None for any. Errors: `request_invalid`."""
    if header is None or header.strip() == "*":
        return None
    match = _ETAG.fullmatch(header.strip())
    if match is None:
        raise WireError(
            "request_invalid",
            f"If-Match is {header[:40]!r}; it must be one version, as in If-Match: 3, or *",
            expected="a version",
            got=header[:40],
        )
    return int(match[1])


def _length(request: Request, layer: Layer, max_bytes: int) -> int:
    """Bytes of the body. Errors: 411 for one of no declared length, 413, 415 for one that is encoded."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise WireError(
            "encoding_unsupported",
            f"Content-Encoding is {encoding[:40]!r}; weights are taken without one",
            status=415,
            expected="identity",
            got=encoding[:40],
        )
    declared = request.headers.get("content-length")
    if declared is None:
        raise WireError(
            "length_required",
            "The body has no Content-Length; weights go into one buffer of that size: send it, not chunks",
            status=411,
            expected="Content-Length",
        )
    length, most = int(declared), largest(layer.spec)
    if length > max_bytes:
        raise _too_large(length, max_bytes, "the limit; raise --max-weights-bytes")
    if length > most:
        raise _too_large(length, most, f"what F32 [{layer.spec.n}, {layer.spec.k}], its bias and header take")
    return length


def _too_large(length: int, limit: int, what: str) -> WireError:
    return WireError(
        "body_too_large",
        f"The body has {length} bytes, more than {limit}, which is {what}",
        status=413,
        expected=f"<= {limit}",
        got=length,
    )


def answer(result: Refitted) -> RefitResult:
    return RefitResult(
        name=result.layer,
        version=str(result.version),
        previous_version=str(result.previous),
        source_dtype=result.source_dtype,
        quantization_error=result.error.quantization,
        arithmetic_error=result.error.arithmetic,
        seconds=RefitSeconds(**result.seconds._asdict()),
    )


_BODY: dict[str, Any] = {
    "parameters": [
        {
            "name": "If-Match",
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": "the version that is to be replaced; another is answered 409",
        }
    ],
    "requestBody": {
        "required": True,
        "description": "A safetensors file: `weight` BF16, F16 or F32 [N, K], or `weight` F8_E4M3 [N, K] "
        "with `weight_scale` U8 or F8_E8M0 [N, ceil(K/32)]; `bias` [N] exactly where the layer has one.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
}
