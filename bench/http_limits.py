"""How near one request over HTTP comes to this machine's own limits.

    ./dev python bench/http_limits.py

For each shape, in one run and interleaved round by round: p50 of a request to gemmwire, of the same bytes to
a bare ASGI echo on the same uvicorn, and of torch.nn.functional.linear on BF16 in this process, on as many
threads. The limit is the echo plus the linear; the ratio says what the protocol, the queue and the
quantization of x cost beyond it. One client on one keep-alive connection, the same for both servers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

SHAPES = ((1, 1024, 1024), (16, 1024, 1024), (256, 1024, 1024))
TARGETS = {1: 1.6, 256: 1.25}
ECHO = """
import sys, uvicorn
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200,
                "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off")
"""


@dataclass(frozen=True)
class Row:
    """p50 in microseconds."""

    m: int
    n: int
    k: int
    gemmwire: float
    echo: float
    linear: float

    @property
    def ratio(self) -> float:
        return self.gemmwire / (self.echo + self.linear)


class Link:
    """One keep-alive connection that sends fixed bytes and reads one answer."""

    def __init__(self, port: int, request: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._buffer = bytearray(64 << 20)

    def round_trip(self) -> None:
        self._socket.sendall(self._request)
        view = memoryview(self._buffer)
        got = 0
        end = -1
        while end < 0:
            got += self._socket.recv_into(view[got:])
            end = self._buffer.find(b"\r\n\r\n", 0, got)
        head = bytes(view[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"the server answered {head[:200]!r}")
        length = int(head.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0])
        while got < end + 4 + length:
            got += self._socket.recv_into(view[got:])


def request(path: str, m: int, k: int) -> bytes:
    """A binary infer request of BF16 [m, k]."""
    data = torch.randn(m, k).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    tensor = {"name": "x", "shape": [m, k], "datatype": "BF16", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head += b" " * (-len(head) % 64)
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + len(data)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + head + data


def p50(call: Callable[[], object], seconds: float) -> float:
    """Median time of a call, in microseconds, over about `seconds`."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def measure(m: int, n: int, k: int, gemmwire: int, echo: int, rounds: int, seconds: float) -> Row:
    x, w = torch.randn(m, k).to(torch.bfloat16), torch.randn(n, k).to(torch.bfloat16)
    calls: list[Callable[[], object]] = [
        Link(gemmwire, request(f"/v2/models/bench{n}x{k}/infer", m, k)).round_trip,
        Link(echo, request("/", m, k)).round_trip,
        lambda: torch.nn.functional.linear(x, w),
    ]
    for call in calls:
        p50(call, 0.2)
    samples = [[p50(call, seconds) for call in calls] for _ in range(rounds)]
    return Row(m, n, k, *(statistics.median(column) for column in zip(*samples, strict=True)))


@contextmanager
def started(command: Sequence[str], port: int) -> Iterator[None]:
    """A server process, from the moment it accepts and is ready."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            _wait(port)
            yield
        finally:
            process.terminate()


def _wait(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as link:
                link.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
                if link.recv(64).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"no server on port {port} after 60 s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| x | W | gemmwire p50 | bare ASGI echo + F.linear | ratio | target |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        target = f"<= {TARGETS[row.m]}" if row.m in TARGETS else ""
        limit = f"{row.echo:.0f} + {row.linear:.0f} us"
        lines.append(
            f"| [{row.m}, {row.k}] | [{row.n}, {row.k}] | {row.gemmwire:.0f} us | {limit} "
            f"| {row.ratio:.2f} | {target} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement in a round")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="of a matmul")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    gemmwire, echo = free_port(), free_port()
    layers = {f"bench{n}x{k}={n}x{k}" for _, n, k in SHAPES}
    serve = [sys.executable, "-m", "gemmwire_service", "--port", str(gemmwire), "--device", "cpu"]
    serve += ["--cpu-threads", str(options.threads)]
    for layer in sorted(layers):
        serve += ["--random-layer", layer]
    with started(serve, gemmwire), started([sys.executable, "-c", ECHO, str(echo)], echo):
        rows = [measure(*shape, gemmwire, echo, options.rounds, options.seconds) for shape in SHAPES]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {options.threads} threads"
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
