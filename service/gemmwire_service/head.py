"""The head of an infer request, as `connection` takes it: parsed once, remembered after that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import httptools

from .infer import HEADER_LENGTH, PARSE_ELSEWHERE_FROM, Headers, tensor_offset

START = b"POST /v2/models/"
END = b"\r\n\r\n"

_PATH = re.compile(rb"/v2/models/([A-Za-z0-9._~-]+)(?:/versions/([A-Za-z0-9._~-]+))?/infer")
_REMEMBERED = 1024  # bytes: a head as clients of tensors have it
# Each asks for something that uvicorn and the ASGI app do; a browser sends origin, and `access` looks at it.
_NOT_PLAIN = (b"transfer-encoding", b"expect", b"content-encoding", b"origin")


@dataclass(frozen=True)
class Head:
    """`text`, as it came; `length` bytes of body follow, its first tensor at `offset`."""

    text: bytes
    layer: str
    version: str | None
    headers: Headers
    length: int
    offset: int
    keep_alive: bool


def parse_head(head: bytes) -> Head | None:
    """`head` up to and with its empty line; None where it is no HTTP, or no plain kind of infer request.

    The parser is uvicorn's, so that a head means the same to both.
    """
    return _remembered(head) if len(head) <= _REMEMBERED else _parse(head)


class _Collector:
    """What the parser calls back."""

    def __init__(self) -> None:
        self.parser: Any = None
        self.url = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.keep_alive = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True
        # Here, as uvicorn asks it: a parser that is through with a message has forgotten.
        self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """The parser saw the head end before we did; only one of us is right."""
        self.complete = False


def _parse(head: bytes) -> Head | None:
    found = _Collector()
    parser = found.parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass  # HTTP/2 is offered, as Java's client does at first; the request is a whole one without it
    except httptools.HttpParserError:
        return None
    finally:
        found.parser = None  # a cycle
    path = _PATH.fullmatch(found.url)
    headers = dict(found.fields)
    if path is None or not found.complete or parser.get_http_version() != "1.1":
        return None
    if len(headers) != len(found.fields) or any(name in headers for name in _NOT_PLAIN):
        return None
    length = headers.get(b"content-length")
    if length is None or _json_bytes(headers, int(length)) >= PARSE_ELSEWHERE_FROM:
        return None
    version = path[2].decode() if path[2] is not None else None
    return Head(
        head, path[1].decode(), version, headers, int(length), tensor_offset(headers), found.keep_alive
    )


_remembered = lru_cache(maxsize=256)(_parse)


def _json_bytes(headers: Headers, length: int) -> int:
    """How much of the body is JSON, as far as its sender says."""
    return tensor_offset(headers) if HEADER_LENGTH in headers else length
