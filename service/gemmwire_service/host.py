"""The CPU as a device: a batch of requests is one call of the backend, on whatever thread asks for it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .backlog import Answer, Item
from .buckets import Ladder
from .done import Done, answer
from .layer import Layer
from .stats import BatchTimes
from .tensors import TORCH_DTYPES, as_bytes, matrix

_ALIGNED = 16  # bytes


class Host:
    """Forwards on the CPU, one at a time."""

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._xs: dict[tuple[int, int], Tensor] = {}

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
        x = self._fill([matrix(item) for item in batch], layer, rows, bucket)
        filled = time.monotonic_ns()
        out = self._compute(x, layer, bucket)
        computed = time.monotonic_ns()
        pieces = _split(out, batch, layer.spec.n)
        times = BatchTimes(began, filled - began, computed - filled, time.monotonic_ns() - computed)
        outcomes: list[Answer | Exception | None] = [
            answer(item, as_bytes(y), layer, bucket, times) for item, y in zip(batch, pieces, strict=True)
        ]
        return Done(batch, outcomes, bucket, times)

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
        return Done([item], [answer(item, as_bytes(y), layer, bucket, times)], bucket, times, forwards)

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
        out = torch.empty(bucket, route.weight.n_pad, dtype=torch.bfloat16)
        route.backend.forward(x, route.weight, route.plan, out)
        return out


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
