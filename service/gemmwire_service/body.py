"""A request's body, received into one buffer."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np

from gemmwire.wire import WireError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_ALIGNMENT = 16  # bytes: what the allocator gives, and the largest item
_DEFLATE_AT_BEST = 1032
_WINDOW = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class ClientLeft(Exception):
    """The client closed the connection before its request was complete; nobody is there to answer."""


def declared_length(headers: dict[bytes, bytes], limit: int) -> int | None:
    """Content-Length, None for a chunked body. Errors: `body_too_large`, before any of the body is read."""
    value = headers.get(b"content-length")
    if value is None:
        return None
    length = int(value)
    if length > limit:
        raise _too_large(length, limit)
    return length


def uncounted(nbytes: int) -> None:
    """Of a small body."""


async def read_body(
    receive: Receive,
    length: int | None,
    limit: int,
    offset: int,
    grow: Callable[[int], None] = uncounted,
) -> memoryview:
    """-> the body; where the length is declared, byte `offset` (the first tensor) lies at an aligned address.

    `grow` hears how many bytes more are taken for it, before they are, and may raise.
    Errors: `body_too_large` as soon as a chunked body passes the limit; ClientLeft.
    """
    if length is None:
        return await _read_chunked(receive, limit, grow)
    grow(length)
    view = aligned(length, offset)
    at = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
        more = message.get("more_body", False)
    if at != length:
        raise WireError(
            "frame_invalid", f"Content-Length is {length}, but {at} bytes came", expected=length, got=at
        )
    return view


def aligned(length: int, offset: int) -> memoryview:
    """`length` bytes, not yet written, of which byte `offset` lies at an aligned address."""
    pad = -offset % _ALIGNMENT
    # Not a bytearray: it would be zeroed, and so take the declared memory before a byte has come.
    return np.empty(pad + length, dtype=np.uint8).data[pad:]


async def _read_chunked(receive: Receive, limit: int, grow: Callable[[int], None]) -> memoryview:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        if len(body) + len(chunk) > limit:
            raise _too_large(len(body) + len(chunk), limit)
        grow(len(chunk))
        body += chunk
        more = message.get("more_body", False)
    return memoryview(body)


def most_inflated(size: int, limit: int) -> int:
    """Bytes that a compressed body can have: deflate shortens to a thousandth."""
    return min(limit, 64 + _DEFLATE_AT_BEST * size)


def decoded(body: memoryview, encoding: bytes | None, limit: int) -> memoryview:
    """The body without its Content-Encoding (gzip or deflate), never inflated beyond `limit` bytes."""
    name = (encoding or b"identity").decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOW:
        raise WireError(
            "encoding_unsupported",
            f"Content-Encoding is {name[:40]!r}; send gzip, deflate or no encoding",
            status=415,
            expected="gzip, deflate or identity",
            got=name[:40],
        )
    return memoryview(_inflate(body, name, limit))


def _inflate(body: memoryview, name: str, limit: int) -> bytearray:
    inflater = zlib.decompressobj(_WINDOW[name])
    try:
        result = bytearray(inflater.decompress(body, limit + 1))
    except zlib.error as error:
        raise WireError("encoding_invalid", f"The {name} body cannot be decoded: {error}") from None
    if len(result) > limit:
        raise _too_large(len(result), limit)
    if not inflater.eof or inflater.unused_data:
        raise WireError("encoding_invalid", f"The {name} body is truncated or has bytes behind its end")
    return result


def _too_large(size: int, limit: int) -> WireError:
    return WireError(
        "body_too_large",
        f"The body has {size} bytes or more, the limit is {limit}; send fewer rows at a time, "
        "or raise --max-body-bytes",
        status=413,
        expected=f"<= {limit}",
        got=size,
    )
