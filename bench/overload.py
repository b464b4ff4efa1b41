"""What a server does under ten times the requests that it can compute, and from clients that mean harm.

    ./dev python bench/overload.py

One gemmwire-serve on the CPU, asked by three crowds for some seconds each: as many clients as keep it busy;
ten times as many, each of which asks again at once when it is refused; and those beside clients that announce
the largest body and stop, or ask and never read. Told for each: answers a second, their p50 and p99, what was
refused, the time that a health check takes meanwhile, and the memory of the server above that before. The
bound that memory is held to is --max-queue-bytes, with what the process takes to compute beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

M, N, K = 256, 1024, 1024
BODY = 2 * M * K
HEAD = b"POST /v2/models/r/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 0\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % BODY + bytes(BODY)
HALF = HEAD + b"Content-Length: %d\r\n\r\n" % (256 << 20) + bytes(1 << 20)
MEGABYTE = 1 << 20
PAUSE_S = 0.005  # of a client that was refused


@dataclass
class Seen:
    """What the clients of one crowd saw. Times in seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    answered: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    most_bytes: int = 0


def memory(process: int) -> int:
    """Bytes of resident memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def server(queue_bytes: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    options = ["--port", "0", "--random-layer", f"r={N}x{K}", "--max-queue-bytes", str(queue_bytes)]
    command = [sys.executable, "-m", "gemmwire_service", "--stall-s", "5", "--log-level", "error", *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GEMMWIRE_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=kept) as running:
        assert running.stdout is not None
        try:
            port = next(found for line in running.stdout if (found := re.search(r"ready on \S+:(\d+)", line)))
            yield running, int(port[1])
        finally:
            running.terminate()
            print(f"stopped with status {running.wait(60)}")


async def answer(reader: asyncio.StreamReader) -> int:
    """Read one whole answer -> its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
    if size is not None:
        await reader.readexactly(int(size[1]))
    return int(head[9:12])


async def asking(port: int, seen: Seen, pause: float) -> None:
    while True:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4 << 20)
            try:
                while True:
                    began = time.perf_counter()
                    writer.write(REQUEST)
                    await writer.drain()
                    status = await answer(reader)
                    seen.statuses[status] += 1
                    if status == 200:
                        seen.answered.append(time.perf_counter() - began)
                    else:
                        await asyncio.sleep(pause)
            finally:
                writer.close()


async def half(port: int, seen: Seen, pause: float) -> None:
    """Announces the largest body, sends a little of it, and waits."""
    while True:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(HALF)
                seen.statuses[await answer(reader)] += 1
            finally:
                writer.close()
        await asyncio.sleep(pause)


async def deaf(port: int, seen: Seen, pause: float) -> None:
    """Asks, and reads nothing."""
    while True:
        with suppress(ConnectionError):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            try:
                for _ in range(50):
                    writer.write(REQUEST)
                    await writer.drain()
            finally:
                writer.close()
        await asyncio.sleep(pause)


async def watching(port: int, process: int, seen: Seen) -> None:
    while True:
        seen.most_bytes = max(seen.most_bytes, memory(process))
        began = time.perf_counter()
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert await answer(reader) == 200
            writer.close()
            seen.health.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)


Client = Callable[[int, Seen, float], Awaitable[None]]


async def crowd(clients: dict[Client, int], port: int, process: int, seconds: float) -> Seen:
    seen = Seen()
    tasks = [asyncio.ensure_future(watching(port, process, seen))]
    for client, count in clients.items():
        tasks += [asyncio.ensure_future(client(port, seen, PAUSE_S)) for _ in range(count)]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
    return seen


def line(name: str, seen: Seen, before: int, seconds: float) -> str:
    times = sorted(seen.answered)
    others = ", ".join(f"{count} x {code}" for code, count in sorted(seen.statuses.items()) if code != 200)
    p50, p99 = statistics.median(times), times[int(0.99 * len(times))]
    return (
        f"{name:<10} {len(times) / seconds:6.0f}/s  p50 {1e3 * p50:5.0f} ms  p99 {1e3 * p99:5.0f} ms  "
        f"health {1e3 * max(seen.health):5.0f} ms at most  "
        f"memory +{(seen.most_bytes - before) / MEGABYTE:4.0f} MB  {others or 'no refusal'}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--clients", type=int, default=8, help="those that keep it busy")
    parser.add_argument("--queue-mb", type=int, default=64)
    options = parser.parse_args(arguments)
    few = options.clients
    crowds: dict[str, dict[Client, int]] = {
        "busy": {asking: few},
        "ten times": {asking: 10 * few},
        "hostile": {asking: 10 * few, half: 3 * few, deaf: 3 * few},
    }
    print(f"x [{M}, {K}], W [{N}, {K}], --max-queue-bytes {options.queue_mb} MB, {options.seconds:g} s each")
    with server(options.queue_mb * MEGABYTE) as (running, port):
        before = memory(running.pid)
        print(f"memory before: {before / MEGABYTE:.0f} MB")
        for name, clients in crowds.items():
            seen = asyncio.run(crowd(clients, port, running.pid, options.seconds))
            print(line(name, seen, before, options.seconds), flush=True)


if __name__ == "__main__":
    main()
