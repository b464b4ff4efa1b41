"""What shared memory saves a client on the server's host.

    ./dev python bench/shm.py

For each shape, in one run and interleaved round by round: p50 of a request with both tensors in shared memory
and a Unix socket as the doorbell; of the same tensors in the body, by the Unix socket and by TCP; and of two
prototypes without a protocol, which map fixed slots of shared memory and are told of them by 8 bytes over a
Unix socket. One of those computes F.linear in BF16, the other what the server computes, quantization of x
included. One client, who writes x and takes y out of the memory each time, the same for all.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from http_limits import Link, free_port, p50, request, started

SHAPES = ((256, 1024, 1024), (2048, 64, 4096))
PREFIX = "gemmwire-bench"
TARGET = 1.25  # times the prototype of F.linear
SLOT = 32 << 20
Y_AT = 24 << 20  # in the slot
DOORBELL = struct.Struct("=III")
DONE = b"doneDONE"


@dataclass(frozen=True)
class Row:
    """p50 in microseconds, in the order of `ways`."""

    m: int
    n: int
    k: int
    times: list[float]


class Memory:
    """An object of shared memory, as both a prototype and a region of the server."""

    def __init__(self, name: str) -> None:
        self.key = "/" + name
        self.path = Path("/dev/shm", name)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(file, SLOT)
        self.map = mmap.mmap(file, SLOT)
        os.close(file)


class Doorbell:
    """A prototype's client: x into the slot, 8 bytes there and back, y out of it."""

    def __init__(self, path: str, memory: Memory, x: bytes, m: int, n: int, k: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._map, self._x = memory.map, x
        self._message = DOORBELL.pack(m, n, k)
        self._y = bytearray(2 * m * n)

    def round_trip(self) -> None:
        self._map[: len(self._x)] = self._x
        self._socket.sendall(self._message)
        if self._socket.recv(8) != DONE:
            raise SystemExit("the prototype ended")
        self._y[:] = memoryview(self._map)[Y_AT : Y_AT + len(self._y)]


class UnixLink(Link):
    """One keep-alive connection over a Unix socket."""

    def __init__(self, path: str, request: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._request = request
        self._buffer = bytearray(64 << 20)


class Shared(UnixLink):
    """The server's client in shared memory."""

    def __init__(self, path: str, memory: Memory, x: bytes, m: int, n: int, k: int) -> None:
        super().__init__(path, _shared_request(m, n, k))
        self._map, self._x = memory.map, x
        self._y = bytearray(2 * m * n)

    def round_trip(self) -> None:
        self._map[: len(self._x)] = self._x
        super().round_trip()
        self._y[:] = memoryview(self._map)[Y_AT : Y_AT + len(self._y)]


def _place(nbytes: int, offset: int = 0) -> dict[str, object]:
    offsets = {"shared_memory_offset": offset} if offset else {}
    return {"shared_memory_region": "bench", "shared_memory_byte_size": nbytes, **offsets}


def _shared_request(m: int, n: int, k: int) -> bytes:
    x = {"name": "x", "shape": [m, k], "datatype": "BF16", "parameters": _place(2 * m * k)}
    y = {"name": "y", "parameters": _place(2 * m * n, Y_AT)}
    body = json.dumps({"inputs": [x], "outputs": [y]}).encode()
    return _post(f"/v2/models/bench{n}x{k}/infer", body)


def _post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def prototype(path: str, slot: str, threads: int, emulate: bool) -> None:
    """Serve one client after the other, on the event loop's own thread."""
    import asyncio

    import uvloop

    torch.set_num_threads(threads)
    with open(f"/dev/shm/{slot}", "r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), SLOT), dtype=torch.bfloat16)
    forwards = {(n, k): _forward(n, k, emulate) for _, n, k in SHAPES}

    class Slots(asyncio.BufferedProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport
            self.message = bytearray(DOORBELL.size)

        def get_buffer(self, sizehint: int) -> bytearray:
            return self.message

        def buffer_updated(self, nbytes: int) -> None:
            m, n, k = DOORBELL.unpack(self.message)
            y = memory[Y_AT // 2 : Y_AT // 2 + m * n].view(m, n)
            forwards[n, k](memory[: m * k].view(m, k), y)
            self.transport.write(DONE)  # type: ignore[attr-defined]

    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(Slots, path)
        await asyncio.Event().wait()

    with torch.inference_mode():
        uvloop.run(serve())


def _forward(n: int, k: int, emulate: bool) -> Callable[[torch.Tensor, torch.Tensor], object]:
    w = torch.randn(n, k).to(torch.bfloat16)
    if not emulate:
        return lambda x, y: torch.mm(x, w.t(), out=y)
    from gemmwire_service.backends import BACKENDS
    from gemmwire_service.mxfp8.weight import MxWeight

    backend = BACKENDS["emulation"]()
    weight = backend.prepare(MxWeight.from_float(w), torch.device("cpu"))
    return lambda x, y: backend.forward(x, weight, backend.plans(len(x))[0], y)


@contextmanager
def prototyped(path: str, memory: Memory, threads: int, emulate: bool) -> Iterator[None]:
    command = [sys.executable, __file__, "--prototype", path, memory.path.name, str(threads), str(emulate)]
    with subprocess.Popen(command) as process:
        try:
            end = time.monotonic() + 60
            while not os.path.exists(path) and time.monotonic() < end:
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def _register(path: str, memory: Memory) -> None:
    body = json.dumps({"key": memory.key, "byte_size": SLOT}).encode()
    UnixLink(path, _post("/v2/systemsharedmemory/region/bench/register", body)).round_trip()


def measure(
    m: int, n: int, k: int, paths: dict[str, str], port: int, memory: Memory, rounds: int, seconds: float
) -> Row:
    message = request(f"/v2/models/bench{n}x{k}/infer", m, k)
    x = message[-2 * m * k :]
    calls = [
        Doorbell(paths["slots"], memory, x, m, n, k).round_trip,
        Doorbell(paths["emulated"], memory, x, m, n, k).round_trip,
        Shared(paths["server"], memory, x, m, n, k).round_trip,
        UnixLink(paths["server"], message).round_trip,
        Link(port, message).round_trip,
    ]
    for call in calls:
        p50(call, 0.2)
    samples = [[p50(call, seconds) for call in calls] for _ in range(rounds)]
    return Row(m, n, k, [statistics.median(column) for column in zip(*samples, strict=True)])


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| x | W | slots + F.linear | slots + the server's forward | shared memory | body, Unix socket "
        "| body, TCP | shared memory / slots + F.linear |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = " | ".join(f"{each:.0f} us" for each in row.times)
        ratio = row.times[2] / row.times[0]
        lines.append(f"| [{row.m}, {row.k}] | [{row.n}, {row.k}] | {times} | {ratio:.2f} (<= {TARGET}) |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement in a round")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="of a matmul")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        paths = {name: os.path.join(folder, name) for name in ("slots", "emulated", "server")}
        memory = Memory(f"{PREFIX}-{os.getpid()}")
        stack.callback(memory.path.unlink)
        port = free_port()
        serve = [sys.executable, "-m", "gemmwire_service", "--port", str(port), "--device", "cpu"]
        serve += ["--cpu-threads", str(options.threads), "--uds", paths["server"], "--shm-prefix", PREFIX]
        for layer in sorted({f"bench{n}x{k}={n}x{k}" for _, n, k in SHAPES}):
            serve += ["--random-layer", layer]
        stack.enter_context(prototyped(paths["slots"], memory, options.threads, emulate=False))
        stack.enter_context(prototyped(paths["emulated"], memory, options.threads, emulate=True))
        stack.enter_context(started(serve, port))
        _register(paths["server"], memory)
        rows = [measure(*shape, paths, port, memory, options.rounds, options.seconds) for shape in SHAPES]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {options.threads} threads"
    )
    print(table(rows))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prototype"]:
        prototype(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "True")
    else:
        sys.exit(main())
