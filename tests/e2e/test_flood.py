"""Clients by the hundred and nonsense by the thousand: the good are served, nothing is kept of the rest."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from http_calls import message
from links import answers, request, statuses
from serving import until
from tampered import Tampered, tampered

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc to count files"),
]

PATH = "/v2/models/r/infer"
BODY, LENGTH = message(torch.ones(1, 64))
GOOD = request(BODY, LENGTH, path=PATH)
HEAD = b"POST /v2/models/r/infer HTTP/1.1\r\nHost: x\r\n"
# Each ends its connection or is answered by a refusal; of the first kind the client leaves at once.
LEAVING = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a port without
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST " + b"/" * 70_000,
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    HEAD + b"Content-Length: 1073741824\r\n\r\n" + b"x" * 5_000,
    GOOD[:40],
    GOOD[:-1],
    b"\0" * 1_000,
)
ANSWERED = (
    request(b"{", path=PATH),
    request(BODY[:-1], LENGTH, path=PATH),
    request(BODY, LENGTH + 1, path=PATH),
    request(BODY, LENGTH, path="/v2/models/nobody/infer"),
    request(b"\x1f\x8b", path=PATH, Content_Encoding="gzip"),
    request(*message(torch.ones(1, 63)), path=PATH),
    request(b"[" * 20_000, path=PATH),
    request(
        b'{"inputs":[{"name":"x","shape":[9223372036854775807,64],"datatype":"FP32","data":[]}]}', path=PATH
    ),
    request(b"{}", path="/v2/repository/models/r/load"),
    request(b"nonsense", path="/v2/repository/models/r/weights"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Tampered]:
    with tampered("", "--random-layer", "r=64x64", "--max-body-bytes", "1048576") as running:
        assert running.port
        yield running


def files(server: Tampered) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def memory(server: Tampered, field: str = "VmRSS") -> int:
    """Bytes."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) << 10


def link(server: Tampered) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def assert_serves(server: Tampered) -> None:
    with link(server) as good:
        for _ in range(20):
            good.sendall(GOOD)
            assert statuses(answers(good, 1)) == [200]


def nonsense(server: Tampered, times: int) -> None:
    """`times` of each that is answered, on few connections, and of each other on one of its own."""
    for _ in range(times // 10):
        with link(server) as kept:
            for bad in ANSWERED * 10:
                kept.sendall(bad)
                [status] = statuses(answers(kept, 1))
                assert 400 <= status < 500, bad[:100]
    for _ in range(times):
        for bad in LEAVING:
            with link(server) as left, suppress(ConnectionError):
                left.sendall(bad)


@pytest.mark.slow
def test_ten_thousand_requests_that_are_none_leave_nothing(server: Tampered) -> None:
    """Guards: a file or memory that is kept of each refusal, and a server that refuses the good ones then."""
    assert_serves(server)
    nonsense(server, 100)
    until(lambda: files(server) < 100, "connections stay open")
    before, held, said = files(server), memory(server), len(server.text)
    nonsense(server, 450)
    assert_serves(server)
    until(lambda: files(server) <= before, "connections stay open")
    assert memory(server) - held < 8 << 20
    assert len(server.text) - said < 10_000, "each of them is in the log"


def test_a_body_beyond_the_limit_takes_no_memory(server: Tampered) -> None:
    """Guards: a body that is gathered before its size is looked at."""
    assert_serves(server)
    before = memory(server, "VmHWM")
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    for _ in range(3):
        with link(server) as large, suppress(ConnectionError):
            large.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(3_000):  # 200 MB, of which 1 MB may be read
                large.sendall(chunk)
    assert memory(server, "VmHWM") - before < 16 << 20
    assert_serves(server)


def test_five_hundred_clients_at_once_are_served(server: Tampered) -> None:
    assert_serves(server)
    before = files(server)
    with ExitStack() as stack:
        links = [stack.enter_context(link(server)) for _ in range(500)]
        for _ in range(3):
            for each in links:
                each.sendall(GOOD)
            for each in links:
                assert statuses(answers(each, 1)) == [200]
    until(lambda: files(server) <= before, "connections stay open")


def test_clients_that_close_one_half_are_let_go_of(server: Tampered) -> None:
    """Guards: a connection that is half closed and never ended, and work for somebody who has left."""
    assert_serves(server)
    before = files(server)
    with ExitStack() as stack:
        for cut in (0, 10, len(GOOD) - 1, len(GOOD)) * 25:
            half = stack.enter_context(link(server))
            half.sendall(GOOD[:cut])
            half.shutdown(socket.SHUT_WR)
        assert_serves(server)
        until(lambda: files(server) <= before, "half-closed connections stay open")
