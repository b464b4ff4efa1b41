"""Requests over HTTP from several client processes, to gemmwire-serve and to a bare ASGI echo beside it."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from http_limits import ECHO, Link, free_port, request, started

CLIENTS = 8
NEEDED = ("fastapi", "pydantic_settings", "uvicorn")


@dataclass(frozen=True)
class HttpRow:
    """Latencies in microseconds."""

    what: str
    per_second: float
    p50: float
    p99: float


def http_rows(shape: tuple[int, int, int], seconds: float, *serve: str) -> list[HttpRow]:
    """Rows for gemmwire and the echo; none where the server's packages are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return []
    m, n, k = shape
    ports = [free_port(), free_port()]
    gemmwire = [sys.executable, "-m", "gemmwire_service", "--port", str(ports[0]), *serve]
    gemmwire += ["--random-layer", f"bench={n}x{k}", "--log-level", "warning"]
    echo = [sys.executable, "-c", ECHO, str(ports[1])]
    with started(gemmwire, ports[0]), started(echo, ports[1]):
        return [
            measure("gemmwire", ports[0], request("/v2/models/bench/infer", m, k), CLIENTS, seconds),
            measure("bare ASGI echo", ports[1], request("/", m, k), CLIENTS, seconds),
            measure("gemmwire, one client", ports[0], request("/v2/models/bench/infer", m, k), 1, seconds),
            measure("bare ASGI echo, one client", ports[1], request("/", m, k), 1, seconds),
        ]


def measure(what: str, port: int, message: bytes, clients: int, seconds: float) -> HttpRow:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request"
        file.write_bytes(message)
        start = time.time() + 2.0  # when every client has been started
        command = [sys.executable, __file__, str(port), str(file), str(start), str(seconds)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(clients)]
        times = [each for client in running for each in json.loads(client.communicate()[0])]
    times.sort()
    p99 = times[int(0.99 * (len(times) - 1))]
    return HttpRow(what, len(times) / seconds, 1e6 * statistics.median(times), 1e6 * p99)


def client(port: int, file: Path, start: float, seconds: float) -> list[float]:
    """A closed loop on one connection; the times of the requests that began and ended between the two."""
    link = Link(port, file.read_bytes())
    for _ in range(20):
        link.round_trip()
    time.sleep(max(0.0, start - time.time()))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        link.round_trip()
        times.append(time.perf_counter() - began)
    return times


def main(arguments: Sequence[str]) -> None:
    port, file, start, seconds = arguments
    print(json.dumps(client(int(port), Path(file), float(start), float(seconds))))


if __name__ == "__main__":
    main(sys.argv[1:])
