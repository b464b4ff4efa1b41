"""The CPU as a device: a batch of requests is one call of the backend, on whatever thread asks for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmwire.wire import Buffer

from .backends.base import PreparedWeight, Product
from .backlog import Item
from .buckets import Ladder
from .done import Done, answers
from .layer import Layer
from .routes import Route
from .stats import BatchTimes
from .tensors import TORCH_DTYPES, as_bytes, matrix

_ALIGNED = 16  # bytes
# A forward of fewer rows takes the time of reading the weight, one of a shorter K that of writing the answer.
_READ_ONCE = 16
_WRITE_ONCE = 256
_LONG = 1 << 28  # of `work`: 1 ms on one core, beside which what the event loop has to do meanwhile is short
# Bytes of a request, or of its answer, that are sooner copied than wrapped into a tensor of their own: each
# call of torch gives Python's lock away, and gets it back when the event loop lets it go.
_COPY_BELOW = 64 << 10


@dataclass(frozen=True)
class Threads:
    """Of one matmul: which of them follows from its bucket and weight alone. On processors without BF16
    instructions oneDNN may split a long sum among threads, and its last bit depends on their number."""

    few: int
    all: int


def work(bucket: int, weight: PreparedWeight) -> int:
    """Multiply-adds of a matmul that takes as long."""
    return max(bucket, _READ_ONCE) * weight.n_pad * max(weight.k_pad, _WRITE_ONCE)


class _Place:
    """Where a bucket of one shape is computed: x and y as tensors, and as the bytes under them."""

    def __init__(self, bucket: int, k_pad: int, n_pad: int) -> None:
        self.x = torch.zeros(bucket, k_pad, dtype=torch.bfloat16)
        self.y = torch.empty(bucket, n_pad, dtype=torch.bfloat16)
        self.x_bytes = as_bytes(self.x)
        self.y_bytes = as_bytes(self.y)
        self._zeros = bytes(self.x_bytes)

    def put(self, rows: list[Buffer]) -> None:
        """BF16 rows side by side, zeros below them."""
        at = 0
        for each in rows:
            self.x_bytes[at : at + len(each)] = each
            at += len(each)
        self.x_bytes[at:] = self._zeros[at:]


class Host:
    """Forwards on the CPU, one at a time, each on `threads`; without these, on as many as torch has it."""

    def __init__(self, ladder: Ladder, threads: Threads | None = None) -> None:
        self._ladder = ladder
        self._threads = threads
        self._xs: dict[tuple[int, int], Tensor] = {}
        self._places: dict[tuple[int, int, int], _Place] = {}

    def forward(self, batch: list[Item]) -> Done:
        """Compute one batch of requests of one layer. Errors: what the backend raises."""
        if batch[0].rows > self._ladder.largest:
            return self._forward_chunks(batch[0])
        return self._forward_batch(batch)

    def compute(self, layer: Layer, x: Tensor) -> Tensor:
        """x [m, K], at most a bucket -> y BF16 [m, N]."""
        rows = len(x)
        bucket = self._ladder.bucket_for(rows)
        return self._compute(self._fill([x], layer, rows, bucket), layer, bucket)[:rows, : layer.spec.n]

    def _forward_batch(self, batch: list[Item]) -> Done:
        began = time.monotonic_ns()
        layer = batch[0].layer
        rows = sum(item.rows for item in batch)
        bucket = self._ladder.bucket_for(rows)
        place = self._place(batch, layer, bucket)
        if place is not None:
            return self._forward_in(place, batch, layer, bucket, began)
        x = self._fill([matrix(item) for item in batch], layer, rows, bucket)
        filled = time.monotonic_ns()
        out = self._compute(x, layer, bucket)
        computed = time.monotonic_ns()
        pieces = [as_bytes(y) for y in _split(out, batch, layer.spec.n)]
        return _done(batch, pieces, layer, bucket, began, filled, computed)

    def _place(self, batch: list[Item], layer: Layer, bucket: int) -> _Place | None:
        """Where a small batch is computed without a tensor made for it; None for any other.

        Small, because its bytes are copied, and BF16 without padding, because they are not converted.
        """
        weight = layer.routes.by_bucket[bucket].weight
        plain = weight.k_pad == layer.spec.k and weight.n_pad == layer.spec.n
        row = 2 * max(weight.k_pad, weight.n_pad)
        if not plain:
            return None
        for item in batch:
            if item.rows * row > _COPY_BELOW or item.datatype != "BF16" or item.x.datatype != "BF16":
                return None
        key = (bucket, weight.k_pad, weight.n_pad)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(*key)
        return place

    def _forward_in(self, place: _Place, batch: list[Item], layer: Layer, bucket: int, began: int) -> Done:
        place.put([item.x.data for item in batch])
        filled = time.monotonic_ns()
        self._run(layer.routes.by_bucket[bucket], place.x, place.y)
        computed = time.monotonic_ns()
        pieces = []
        start = 0
        for item in batch:
            end = start + item.rows * layer.spec.n * 2
            pieces.append(bytes(place.y_bytes[start:end]))
            start = end
        return _done(batch, pieces, layer, bucket, began, filled, computed)

    def _forward_chunks(self, item: Item) -> Done:
        """Each chunk at the largest bucket, the last one too: the answer names one bucket for all rows."""
        began = time.monotonic_ns()
        layer, source, bucket = item.layer, matrix(item), self._ladder.largest
        y = torch.empty(item.rows, layer.spec.n, dtype=TORCH_DTYPES[item.datatype])
        start = forwards = 0
        for rows in self._ladder.chunks(item.rows):
            if not item.wanted(time.monotonic_ns()):
                return Done([item], [None])
            x = self._fill([source[start : start + rows]], layer, rows, bucket)
            y[start : start + rows].copy_(self._compute(x, layer, bucket)[:rows, : layer.spec.n])
            start += rows
            forwards += 1
        times = BatchTimes(began, 0, time.monotonic_ns() - began, 0)
        return Done([item], answers([item], [as_bytes(y)], layer, bucket, times), bucket, times, forwards)

    def _fill(self, sources: list[Tensor], layer: Layer, rows: int, bucket: int) -> Tensor:
        """Rows side by side, rounded to BF16, and zeros below them: the bits depend on nothing earlier."""
        if len(sources) == 1 and rows == bucket and _fits(sources[0], layer, bucket):
            return sources[0]
        x = self._rows(layer.spec.k, layer.routes.by_bucket[bucket].weight.k_pad, bucket)
        start = 0
        for source in sources:
            x[start : start + len(source), : layer.spec.k].copy_(source)
            start += len(source)
        if rows < bucket:
            x[rows:].zero_()
        return x

    def _rows(self, k: int, k_pad: int, bucket: int) -> Tensor:
        """The static x of this K, BF16 [bucket, k_pad], grown to the largest bucket used; columns beyond k
        stay zero, the others hold what the last use left there."""
        buffer = self._xs.get((k, k_pad))
        if buffer is None or buffer.shape[0] < bucket:
            buffer = torch.zeros(bucket, k_pad, dtype=torch.bfloat16)
            self._xs[k, k_pad] = buffer
        return buffer[:bucket]

    def _compute(self, x: Tensor, layer: Layer, bucket: int) -> Tensor:
        route = layer.routes.by_bucket[bucket]
        if isinstance(route.backend, Product):
            self._set_threads(route, bucket)
            return route.backend.product(x, route.weight, route.plan)
        out = torch.empty(bucket, route.weight.n_pad, dtype=torch.bfloat16)
        self._run(route, x, out)
        return out

    def _run(self, route: Route, x: Tensor, out: Tensor) -> None:
        self._set_threads(route, x.shape[0])
        route.backend.forward(x, route.weight, route.plan, out)

    def _set_threads(self, route: Route, bucket: int) -> None:
        threads = self._threads
        if threads is not None:  # torch's number is of the calling thread
            torch.set_num_threads(threads.all if work(bucket, route.weight) >= _LONG else threads.few)


def _done(
    batch: list[Item],
    pieces: Sequence[Buffer],
    layer: Layer,
    bucket: int,
    began: int,
    filled: int,
    computed: int,
) -> Done:
    """The bytes of each request's answer, and the ns at which x was filled and y computed."""
    times = BatchTimes(began, filled - began, computed - filled, time.monotonic_ns() - computed)
    return Done(batch, answers(batch, pieces, layer, bucket, times), bucket, times)


def _fits(source: Tensor, layer: Layer, bucket: int) -> bool:
    """Whether the bytes that came are already what a backend takes."""
    return (
        source.dtype is torch.bfloat16
        and layer.routes.by_bucket[bucket].weight.k_pad == layer.spec.k
        and source.data_ptr() % _ALIGNED == 0
    )


def _split(out: Tensor, batch: list[Item], n: int) -> list[Tensor]:
    """The rows of each request, in its datatype."""
    if len(batch) == 1 and out.dtype is TORCH_DTYPES[batch[0].datatype] and out.shape == (batch[0].rows, n):
        return [out]
    pieces = []
    start = 0
    for item in batch:
        pieces.append(out[start : start + item.rows, :n].to(TORCH_DTYPES[item.datatype]).contiguous())
        start += item.rows
    return pieces
