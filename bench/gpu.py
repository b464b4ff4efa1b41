"""What a forward costs on a GPU, beside what it could cost at best.

    PYTHONPATH=client:service python3 bench/gpu.py

Kernels: a graph of the layer's forward over a graph of torch.nn.functional.linear in BF16, for each bucket,
with a cold L2 cache. Host: pinned memory to pinned memory, one request at a time and eight in flight. HTTP:
eight clients, beside a bare ASGI echo of the same bytes on the same uvicorn (skipped where the server's
packages are not installed).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_http import HttpRow, http_rows

from gemmwire.wire import Tensor as WireTensor
from gemmwire_service.backends import Selection
from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device, Job
from gemmwire_service.done import Done
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.pipeline import Pipeline
from gemmwire_service.program import Program, Statics
from gemmwire_service.routes import Route, Routes
from gemmwire_service.staging import DEPTH, give_back
from gemmwire_service.timer import CudaTimer

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
BUCKETS = Ladder().buckets
ROUNDS = 5
M, N, K = 16, 4096, 4096
IN_FLIGHT = 8
MOST_ALONE_US = 40.0
LEAST_GAIN = 2.5  # of eight in flight over one
LEAST_OF_ECHO = 0.7


def kernel_target(m: int) -> float | None:
    return 1.15 if m <= 64 else 1.05 if m >= 256 else None


@dataclass(frozen=True)
class KernelRow:
    """Microseconds, medians."""

    n: int
    k: int
    m: int
    forward: float
    linear: float

    @property
    def ratio(self) -> float:
        return self.forward / self.linear


@dataclass(frozen=True)
class HostRow:
    what: str
    p50: float  # us of one request; 0 where many are in flight
    per_second: float


def random_layer(n: int, k: int, device: torch.device, ladder: Ladder) -> tuple[Layer, torch.Tensor]:
    weight = torch.randn(n, k, device=device) / k**0.5
    backend = Emulation()
    prepared = backend.prepare(MxWeight.from_float(weight.cpu()), device)
    by_bucket = {bucket: Route(backend, prepared, backend.plans(bucket)[0]) for bucket in ladder.buckets}
    routes = Routes(Selection(backend, ()), by_bucket, ())
    return Layer(LayerSpec("bench", n, k, False), routes, "bench", "F32"), weight.to(torch.bfloat16)


def kernel_rows(device: torch.device) -> list[KernelRow]:
    timer = CudaTimer(device)
    rows = []
    with torch.inference_mode():
        for n, k in SHAPES:
            layer, weight = random_layer(n, k, device, Ladder())
            statics = Statics(device, BUCKETS[-1])
            for m in BUCKETS:
                program = Program.of(layer.routes.by_bucket[m], m, statics)
                x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                program.x.rows(m).copy_(x)
                forward, linear = interleaved(
                    timer, program.eager, lambda x=x, weight=weight: F.linear(x, weight)
                )
                rows.append(KernelRow(n, k, m, forward, linear))
    return rows


def interleaved(timer: CudaTimer, *runs: Callable[[], object]) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, kept in zip(runs, times, strict=True):
            kept.append(timer.microseconds(run))  # type: ignore[arg-type]
    return [statistics.median(kept) for kept in times]


# Host to host.


def host_rows(device: torch.device, seconds: float) -> list[HostRow]:
    ladder = Ladder.up_to(256)
    layer, _ = random_layer(N, K, device, ladder)
    done = Requests(layer, seconds)
    owner = Device(device, ladder, done.report)
    done.device = owner
    rows: list[HostRow] = []
    ended = threading.Event()

    def measure() -> None:
        owner.capture(layer)
        owner.allocate()
        pipeline = owner._pipeline
        assert pipeline is not None
        rows.append(alone(pipeline, layer, seconds))
        rows.append(overlapped(pipeline, layer, seconds, 1))
        rows.append(overlapped(pipeline, layer, seconds, IN_FLIGHT))
        ended.set()

    owner.start()
    owner.put(Job(measure))
    if not ended.wait(60 + 4 * seconds):
        raise RuntimeError("the device thread did not come to its end; see above")
    for count in (1, IN_FLIGHT):
        rows.append(done.run(count))
    owner.stop()
    return rows


def alone(pipeline: Pipeline, layer: Layer, seconds: float) -> HostRow:
    staging, program = pipeline._staging, layer.programs[M]
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        staging.send(program, M, lambda slot: None)
        give_back(staging.receive())
        times.append(time.perf_counter() - began)
    return HostRow("one at a time", 1e6 * statistics.median(times), len(times) / sum(times))


def overlapped(pipeline: Pipeline, layer: Layer, seconds: float, shared: int) -> HostRow:
    """As many batches under way as there are slots; `shared` requests in each, as coalescing makes them."""
    staging, program = pipeline._staging, layer.programs[shared * M]
    count = 0
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        while len(staging.flights) < DEPTH:
            staging.send(program, shared * M, lambda slot: None)
        give_back(staging.receive())
        count += shared
    while staging.flights:
        give_back(staging.receive())
        count += shared
    what = "each its own forward" if shared == 1 else f"{shared} requests in one forward"
    return HostRow(f"{DEPTH} forwards under way, {what}", 0.0, count / (time.perf_counter() - began))


class Requests:
    """A closed loop of requests through the device's queue, with coalescing, as the engine puts them."""

    device: Device

    def __init__(self, layer: Layer, seconds: float) -> None:
        self._layer = layer
        self._seconds = seconds
        self._x = WireTensor("x", "BF16", (M, K), bytearray(2 * M * K))
        self._times: list[int] = []
        self._end = 0.0
        self._left = 0
        self._ended = threading.Event()

    def put(self) -> None:
        self.device.put(Item(self._layer, self._x, M, "BF16", lambda item: None))

    def run(self, count: int) -> HostRow:
        self._times, self._left = [], count
        self._ended.clear()
        began = time.perf_counter()
        self._end = began + self._seconds
        for _ in range(count):
            self.put()
        self._ended.wait()
        took = time.perf_counter() - began
        return HostRow(
            f"through the queue, {count} in flight",
            statistics.median(self._times) / 1e3,
            len(self._times) / took,
        )

    def report(self, done: Done) -> None:
        now = time.monotonic_ns()
        for item, outcome in zip(done.items, done.outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            self._times.append(now - item.arrived)
            if time.perf_counter() < self._end:
                self.put()
            else:
                self._left -= 1
        if not self._left:
            self._ended.set()


# Tables.


def kernel_table(rows: Sequence[KernelRow]) -> str:
    lines = [
        "| N x K | M | forward | BF16 F.linear | ratio | at most |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        target = kernel_target(row.m)
        shown = "" if target is None else f"{target}{'' if row.ratio <= target else ' (missed)'}"
        lines.append(
            f"| {row.n}x{row.k} | {row.m} | {row.forward:.1f} us | {row.linear:.1f} us "
            f"| {row.ratio:.2f} | {shown} |"
        )
    return "\n".join(lines)


def host_table(rows: Sequence[HostRow]) -> str:
    lines = [f"| x [{M}, {K}], W [{N}, {K}] | p50 | requests/s |", "| --- | ---: | ---: |"]
    for row in rows:
        p50 = f"{row.p50:.1f} us" if row.p50 else ""
        lines.append(f"| {row.what} | {p50} | {row.per_second:.0f} |")
    alone, shared, one, many = rows[0], rows[2], rows[3], rows[4]
    gains = f"{shared.per_second / alone.per_second:.1f} and {many.per_second / one.per_second:.1f} times"
    lines += [
        "",
        f"One at a time: {alone.p50:.1f} us (at most {MOST_ALONE_US}). Eight in flight have {gains} the "
        f"throughput of one, without and with the queue (at least {LEAST_GAIN}).",
    ]
    return "\n".join(lines)


def http_table(rows: Sequence[HttpRow]) -> str:
    lines = ["| HTTP, 8 clients | requests/s | p50 | p99 |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {row.what} | {row.per_second:.0f} | {row.p50:.0f} us | {row.p99:.0f} us |" for row in rows]
    if rows:
        share = rows[0].per_second / rows[1].per_second
        lines += ["", f"Eight clients: {share:.2f} of the echo's rate (at least {LEAST_OF_ECHO})."]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="kernels,host,http", help="parts, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each measurement of the last two parts"
    )
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"bench/gpu.py: torch {torch.__version__} sees no CUDA device here", file=sys.stderr)
        return 1
    device = torch.device("cuda", 0)
    parts = options.only.split(",")
    found: dict[str, list[dict[str, object]]] = {}
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}\n")
    if "kernels" in parts:
        kernels = kernel_rows(device)
        found["kernels"] = [asdict(row) for row in kernels]
        print(kernel_table(kernels) + "\n", flush=True)
    if "host" in parts:
        host = host_rows(device, options.seconds)
        found["host"] = [asdict(row) for row in host]
        print(host_table(host) + "\n", flush=True)
    if "http" in parts:
        http = http_rows((M, N, K), options.seconds)
        found["http"] = [asdict(row) for row in http]
        print(
            http_table(http) + "\n" if http else "HTTP: the server's packages are not installed\n", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
