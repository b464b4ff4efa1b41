"""A client's connection as bytes: requests that no HTTP library would send, and answers with their heads."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from http_calls import HEADER_LENGTH, message
from serving import Served, hold


@contextmanager
def linked(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
        yield link


@contextmanager
def held(served: Served) -> Iterator[None]:
    """The device does nothing in this block."""
    gate = threading.Event()
    hold(served.engine, gate)
    try:
        yield
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


def statuses(found: list[bytes]) -> list[int]:
    return [int(answer[9:12]) for answer in found]


X = torch.linspace(-2, 3, 3 * 128).view(3, 128)
GOOD = request(*message(X))  # to layer m.plain
