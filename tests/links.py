"""A client's connection as bytes: requests that no HTTP library would send, and answers with their heads."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from http_calls import HEADER_LENGTH, json_message, message
from serving import Served, hold, until


@contextmanager
def linked(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
        yield link


@contextmanager
def held(served: Served) -> Iterator[None]:
    """The device does nothing in this block; what has come by its end is together before the device."""
    gate = threading.Event()
    hold(served.engine, gate)
    try:
        yield
        # A request that is counted is the device's only after that turn of the event loop.
        until(lambda: not served.engine._new, "the event loop keeps requests")
    finally:
        gate.set()


def request(
    body: bytes,
    length: int | None = None,
    *,
    path: str = "/v2/models/m.plain/infer",
    version: str = "1.1",
    **headers: str,
) -> bytes:
    fields = {"Host": "x", "Content-Length": str(len(body))}
    if length is not None:
        fields[HEADER_LENGTH] = str(length)
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/{version}\r\n{lines}\r\n".encode() + body


def answers(link: socket.socket, count: int) -> list[bytes]:
    """That many whole answers, each with its head."""
    found: list[bytes] = []
    received = b""
    while len(found) < count:
        head, end, rest = received.partition(b"\r\n\r\n")
        size = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
        if end and size is not None and len(rest) >= int(size[1]):
            found.append(head + end + rest[: int(size[1])])
            received = rest[int(size[1]) :]
            continue
        chunk = link.recv(1 << 20)
        assert chunk, f"closed after {len(found)} answers and {received[:200]!r}"
        received += chunk
    return found


def body_of(answer: bytes) -> tuple[dict[str, Any], bytes]:
    """Its JSON part and the bytes behind it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"header-content-length: (\d+)", head)
    at = int(length[1]) if length is not None else len(body)
    return json.loads(body[:at]), body[at:]


def ask(link: socket.socket, sent: bytes) -> bytes:
    link.sendall(sent)
    return answers(link, 1)[0]


def statuses(found: list[bytes]) -> list[int]:
    return [int(answer[9:12]) for answer in found]


X = torch.linspace(-2, 3, 3 * 128).view(3, 128)
GOOD = request(*message(X))  # to layer m.plain

REQUESTS = {
    "binary": GOOD,
    "json": request(json_message(X)),
    "raw": request(X.bfloat16().view(torch.uint8).numpy().tobytes(), 0),
    "version": request(*message(X), path="/v2/models/m.plain/versions/1/infer"),
    "no-rows": request(*message(X[:0])),
    "binary-in-json-out": request(*message(X, parameters={})),
    "much-json-out": request(*message(torch.ones(1, 32), parameters={}), path="/v2/models/tall/infer"),
    "request-id": request(*message(X), x_request_id="abc-1"),
    "id-and-timeout": request(*message(X, id="7"), gemmwire_timeout_us="60000000"),
    "close": request(*message(X), Connection="close"),
    "close-without-a-body": request(b"", Connection="close"),
    "wrong-k": request(*message(torch.ones(2, 127))),
    "wrong-k-with-id": request(*message(torch.ones(2, 127)), x_request_id="abc-1", Connection="close"),
    "json-that-is-none": request(b"{"),
    "length-beyond-the-body": request(b"{}", 9),
    "header-length-that-is-none": request(b"{}", None, inference_header_content_length="-1"),
    "timeout-that-is-none": request(*message(X), gemmwire_timeout_us="soon"),
    "unknown-layer": request(*message(X), path="/v2/models/nowhere/infer"),
    "unknown-version": request(*message(X), path="/v2/models/m.plain/versions/9/infer"),
    "query": request(*message(X), path="/v2/models/m.plain/infer?a=1"),
    "escaped": request(*message(X), path="/v2/models/m%2Eplain/infer"),
    "http-1.0": request(*message(X), version="1.0"),
    "chunked": GOOD.split(b"\r\n\r\n")[0].replace(b"\r\nContent-Length", b"\r\nWas-Length")
    + b"\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(message(X)[0])
    + message(X)[0]
    + b"\r\n0\r\n\r\n",
    "two-lengths": request(*message(X), content_length="1"),
    "header-length-twice": request(*message(X), INFERENCE_HEADER_CONTENT_LENGTH="5"),
    "not-http": b"POST /v2/models/m.plain/infer HTTP/1.1\r\nno colon\r\n\r\n",
    "folded": b"POST /v2/models/m.plain/infer HTTP/1.1\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
}


def steady(answer: bytes) -> bytes:
    """The answer without what differs from one time to the next: the date, the times and their padding."""
    head, _, body = answer.partition(b"\r\n\r\n")
    timed = b"_us" in body
    head = re.sub(rb"(?m)^date: .*\r\n", b"", head)
    if timed:  # the lengths stay in their places
        head = re.sub(rb"(content-length): \d+", rb"\1: ?", head)
    return head + b"\r\n\r\n" + re.sub(rb'"(queue|device)_us":\d+|(?<=}) *', b"", body)
