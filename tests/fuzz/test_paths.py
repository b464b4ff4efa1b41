"""The two ways of an infer request: whatever comes over a connection, both make the same requests of it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fuzz.effort import while_there_is_time
from http_calls import HEADER_LENGTH, message
from serving import Served, serving, settings

BODY, LENGTH = message(torch.ones(1, 128))
SILENCE_S = 0.5  # after which a server waits for more of a request
# Of each answer its status, the code of a refusal, and whether the connection goes on; not times and dates.
TOLD = re.compile(rb'HTTP/1\.1 \d{3}|"code": "\w+"|(?i:\r\nconnection: close)|"outputs"')

PATHS = (
    "/v2/models/m.plain/infer",
    "/v2/models/m.plain/versions/1/infer",
    "/v2/models/m.plain/versions/9/infer",
)
OTHERS = (
    "/v2/models/nobody/infer",
    "/v2/models/m.plain/infer/",
    "//v2/models/m.plain/infer",
    "/v2/health/live",
)
ODD = ("/v2/models/m%2eplain/infer", "/v2/models/m.plain/infer?x=1", "/v2/models/../infer", "*")
BODIES = (BODY, BODY[:-1], BODY + b"x", b"", b"{", BODY[:LENGTH])
FIELDS = (
    *("Connection: close", "Connection: keep-alive", "Connection: x, close", "X-Request-Id: a", "X-A: b:c"),
    *(
        "Expect: 100-continue",
        "Expect: nothing",
        "Origin: http://h",
        "Content-Encoding: identity",
        "TE: trailers",
    ),
    *("Upgrade: h2c", "Connection: upgrade", "Content-Encoding: gzip", "gemmwire-timeout-us: 5000000"),
    *(
        f"{HEADER_LENGTH}: {LENGTH}",
        f"{HEADER_LENGTH}: 0",
        f"{HEADER_LENGTH}: x",
        "X-B:",
        "X-C: \tc ",
        "x" * 900 + ": y",
    ),
    *(
        "Transfer-Encoding: identity",
        "Content-Length: 0",
        "Content-Length : 3",
        " folded: x",
        "no colon",
        "X-\x01: y",
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, right or nearly: its body has the length it states, is chunked, or is something else."""
    right = draw(st.integers(0, 3)) > 0
    method = "POST" if right else draw(st.sampled_from(["POST", "GET", "PUT", "HEAD", "post", "OPTIONS"]))
    path = draw(st.sampled_from(PATHS[:2] if right else (*PATHS, *OTHERS, *ODD)))
    version = "1.1" if right else draw(st.sampled_from(["1.1", "1.0", "2.0", "1.2"]))
    body = BODY if right else draw(st.sampled_from(BODIES))
    fields = [f"{HEADER_LENGTH}: {LENGTH}"] if right or draw(st.booleans()) else []
    fields += draw(st.lists(st.sampled_from(FIELDS[:5] if right else FIELDS), max_size=3))
    framing = "length" if right else draw(st.sampled_from(["length", "length", "chunked", "both", "none"]))
    if framing in ("length", "both"):
        fields.append(f"Content-Length: {len(body)}")
    if framing in ("chunked", "both"):
        fields.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    fields = ["Host: x", *draw(st.permutations(fields))]
    end = "\r\n" if right else draw(st.sampled_from(["\r\n", "\r\n", "\r\n", "\n"]))
    head = end.join([f"{method} {path} HTTP/{version}", *fields, "", ""])
    return head.encode("latin-1") + body


STREAMS = st.lists(requests(), min_size=1, max_size=4).map(b"".join)
CUTS = st.lists(st.floats(0, 1), max_size=3)


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Iterator[tuple[Served, Served]]:
    options: dict[str, Any] = {"model": (f"m={checkpoint}",)}
    with serving(settings(**options)) as fast, serving(settings(**options, fast_path=False)) as asgi:
        yield fast, asgi


def test_both_paths_read_the_same_requests_from_a_connection(both: tuple[Served, Served]) -> None:
    """Guards: bytes that one path takes for a body and the other for a request: one that is smuggled."""

    @hypothesis_settings(
        max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(STREAMS, CUTS)
    def alike(stream: bytes, cuts: list[float]) -> None:
        pieces = cut(stream, cuts)
        fast, asgi = (answers(served, pieces) for served in both)
        assert fast == asgi, stream

    while_there_is_time(alike)


def cut(stream: bytes, cuts: list[float]) -> list[bytes]:
    places = sorted(int(place * len(stream)) for place in cuts)
    return [stream[begin:end] for begin, end in zip([0, *places], [*places, len(stream)], strict=True)]


def answers(served: Served, pieces: list[bytes]) -> list[bytes]:
    """What is told by all that comes back until the connection ends, or the server waits for more."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=SILENCE_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):  # the server may end it, having said why
            for piece in pieces:
                link.sendall(piece)
            # So that it need not be waited for what is complete: the last answer ends the connection.
            link.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        with suppress(ConnectionError, TimeoutError):
            while chunk := link.recv(1 << 16):
                received += chunk
    return TOLD.findall(received)
