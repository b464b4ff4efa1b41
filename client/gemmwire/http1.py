"""HTTP/1.1 as a client needs it, without I/O: a request's head as bytes, an answer's head from bytes.

The standard library reads an answer's head with the parser for e-mail, which takes longer than the rest of a
small request together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .errors import WireError
from .messages import Buffer

MAX_HEAD = 64 << 10
MAX_BODY = 1 << 32

_STATUS = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True)
class Request:
    """`path` is the target as it goes on the wire; `headers` hold everything but the body's length.

    `repeatable`: it may be sent again where the connection ended without an answer. `again` makes it anew for
    a reply that may take so many seconds, where it says how long that is.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Sequence[Buffer] = ()
    repeatable: bool = True
    again: Callable[[float | None], Request] | None = None


@dataclass(frozen=True)
class Reply:
    """`headers` has lower-case names; `body` is one buffer of its own."""

    status: int
    headers: Mapping[str, str]
    body: bytearray


@dataclass(frozen=True)
class Head:
    """The head of an answer. `length` None: the body is chunked, or goes on until the connection ends."""

    status: int
    headers: Mapping[str, str]
    length: int | None
    chunked: bool
    keep_alive: bool


def write_head(request: Request, body_bytes: int) -> bytes:
    lines = [f"{request.method} {request.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    if request.method != "GET":
        lines.append(f"content-length: {body_bytes}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def message(request: Request) -> list[memoryview]:
    """The request as it goes out: its head, and the buffers of its body that hold something."""
    body = [memoryview(buffer).cast("B") for buffer in request.body if len(buffer)]
    return [memoryview(write_head(request, sum(map(len, body)))), *body]


def read_head(head: bytes) -> Head:
    """The bytes in front of the empty line -> the head. Errors: `WireError` (`http_invalid`)."""
    first, *lines = head.decode("latin-1").split("\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise invalid(f"it begins with {first[:40]!r}; is this the address of an HTTP server?")
    status = int(match[2])
    headers = _headers(lines)
    chunked = "transfer-encoding" in headers
    if chunked and headers["transfer-encoding"].lower() != "chunked":
        raise invalid(f"its transfer-encoding is {headers['transfer-encoding'][:40]!r}")
    connection = headers.get("connection", "").lower()
    return Head(
        status=status,
        headers=headers,
        length=_length(status, headers, chunked),
        chunked=chunked,
        keep_alive="close" not in connection if match[1] == "1" else "keep-alive" in connection,
    )


def chunk_size(line: bytes) -> int:
    """The first line of a chunk -> its size in bytes. Errors: `WireError` (`http_invalid`)."""
    digits = line.partition(b";")[0].strip()
    if not re.fullmatch(rb"[0-9A-Fa-f]{1,16}", digits):
        raise invalid(f"a chunk begins with {line[:40]!r}")
    return int(digits, 16)


def refuse_large(size: int) -> None:
    if size > MAX_BODY:
        raise invalid(f"its body has {size} bytes; at most {MAX_BODY} are taken")


def is_token(name: str) -> bool:
    """Whether this can be a header's name."""
    return _TOKEN.fullmatch(name) is not None


def invalid(reason: str) -> WireError:
    return WireError("http_invalid", f"The answer is not HTTP/1.1 that can be read: {reason}")


def _headers(lines: Sequence[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not is_token(name):
            raise invalid(f"a header line is {line[:40]!r}")
        name, value = name.lower(), value.strip(" \t")
        if name not in headers:
            headers[name] = value
        elif name != "content-length":
            headers[name] += ", " + value
        elif headers[name] != value:
            raise invalid(f"it has two lengths, {headers[name][:20]!r} and {value[:20]!r}")
    return headers


def _length(status: int, headers: Mapping[str, str], chunked: bool) -> int | None:
    if status < 200 or status in (204, 304):
        return 0
    text = headers.get("content-length")
    if chunked or text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise invalid(f"its content-length is {text[:40]!r}")
    refuse_large(int(text))
    return int(text)
