"""`gemmwire bench URL LAYER`."""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from gemmwire.arrays import NAMES
from gemmwire.client import Client
from gemmwire.errors import InvalidArgument

from .dtypes import converted
from .progress import Progress
from .result import Result, table

_WARM_UP = 3  # requests of each M
_HEADS = ("M", "clients", "requests/s", "rows/s", "p50 us", "p90 us", "p99 us", "device us", "queue us")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layer", metavar="LAYER")
    parser.add_argument("--rows", default="1,16,256", metavar="M,M,...", help="of a request (1,16,256)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="for each M (2)")
    parser.add_argument("--clients", type=int, default=1, metavar="N", help="threads that send (1)")
    parser.add_argument("--dtype", choices=NAMES, default="FP32", help="of x (FP32)")
    parser.add_argument("--quantize", choices=("client", "server"), default="server", help="where (server)")


def run(client: Client, options: argparse.Namespace) -> Result:
    ms = _rows(options.rows)
    if options.clients < 1 or not 0 < options.seconds < 86400:
        raise InvalidArgument("--clients has to be 1 or more, and --seconds above 0")
    k = client.layer(options.layer).k
    measured = []
    with Progress(options.layer, len(ms) * options.seconds, "s") as progress:
        for index, m in enumerate(ms):
            run = _Run(client, options, _x(m, k, options.dtype))
            measured.append(run.measure(progress, index * options.seconds))
    rows = [list(entry.values()) for entry in measured]
    return Result({"layer": options.layer, "k": k, "measured": measured}, table(_HEADS, rows))


@dataclass
class _Run:
    """Requests of one x, one after the other in each thread, until the time is over."""

    client: Client
    options: argparse.Namespace
    x: Any
    seconds: list[float] = field(default_factory=list)
    device_us: list[int] = field(default_factory=list)
    queue_us: list[int] = field(default_factory=list)
    failure: Exception | None = None

    def measure(self, progress: Progress, before: float) -> dict[str, object]:
        for _ in range(_WARM_UP):
            self._call()
        self.seconds.clear()
        self.device_us.clear()
        self.queue_us.clear()
        began = time.perf_counter()
        end = began + self.options.seconds
        threads = [
            threading.Thread(target=self._work, args=(end,), daemon=True) for _ in range(self.options.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
                progress.reach(before + min(self.options.seconds, time.perf_counter() - began))
        if self.failure is not None:
            raise self.failure
        return self._document(time.perf_counter() - began)

    def _work(self, end: float) -> None:
        try:
            while time.perf_counter() < end and self.failure is None:
                self._call()
        except Exception as error:  # raised by the thread that waits
            self.failure = error

    def _call(self) -> None:
        began = time.perf_counter()
        answer = self.client.call(self.options.layer, self.x, quantize=self.options.quantize)
        self.seconds.append(time.perf_counter() - began)
        self.device_us.append(answer.device_us or 0)
        self.queue_us.append(answer.queue_us or 0)

    def _document(self, took: float) -> dict[str, object]:
        count, m = len(self.seconds), len(self.x)
        return {
            "m": m,
            "clients": self.options.clients,
            "requests_per_s": count / took,
            "rows_per_s": count * m / took,
            "p50_us": _at(self.seconds, 0.5) * 1e6,
            "p90_us": _at(self.seconds, 0.9) * 1e6,
            "p99_us": _at(self.seconds, 0.99) * 1e6,
            "device_us": float(_at(self.device_us, 0.5)),
            "queue_us": float(_at(self.queue_us, 0.5)),
        }


def _rows(text: str) -> list[int]:
    try:
        ms = [int(part) for part in text.split(",")]
    except ValueError:
        ms = [0]
    if min(ms) < 1:
        raise InvalidArgument(f"--rows is {text!r:.80}; it must be whole numbers above 0, as 1,16,256")
    return ms


def _x(m: int, k: int, datatype: str) -> Any:
    import numpy as np

    x = np.random.default_rng(0).standard_normal((m, k), dtype=np.float32)
    return converted(x, datatype)


def _at(values: list[Any], share: float) -> Any:
    """The value below which this share of them lies; all of them are there."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
