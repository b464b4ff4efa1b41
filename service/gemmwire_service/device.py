"""The device: every forward, load and refit, one at a time, in the order of one queue.

It has a thread of its own. Where the device is the CPU and a batch is so small that waking the thread would
take longer than the matmul, the event loop computes it itself (`compute_now`), if it is the device's turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from .backlog import Answer, Backlog, Item
from .buckets import Ladder
from .layer import Layer
from .stats import BatchTimes

log = logging.getLogger("gemmwire.device")

# Multiply-adds of a matmul that takes about as long as waking a thread does, 0.1 ms. Below _READ_ONCE rows
# the time is that of reading the weight, below a K of _WRITE_ONCE that of writing the answer.
_NOW_BELOW = 1 << 24
_READ_ONCE = 16
_WRITE_ONCE = 256
_ALIGNED = 16  # bytes

TORCH_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


class Done(NamedTuple):
    """What became of some requests: an Answer or an error each, None where it was dropped."""

    items: list[Item]
    outcomes: list[Answer | Exception | None]
    bucket: int = 0
    times: BatchTimes | None = None
    forwards: int = 1


@dataclass(frozen=True)
class Job:
    """Work that is not a forward (load, refit): it runs after the requests that came before it."""

    run: Callable[[], None]


class Staging:
    """The static x of each K, grown to the largest bucket used: columns beyond K stay zero."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def rows(self, k: int, k_pad: int, bucket: int) -> Tensor:
        """-> BF16 [bucket, k_pad]; the first k columns hold what the last use left there."""
        buffer = self._buffers.get((k, k_pad))
        if buffer is None or buffer.shape[0] < bucket:
            buffer = torch.zeros(bucket, k_pad, dtype=torch.bfloat16, device=self._device)
            self._buffers[k, k_pad] = buffer
        return buffer[:bucket]


class Device:
    """A thread that computes. `report` is called on it with every `Done`; it must hand over and return."""

    def __init__(
        self,
        device: torch.device,
        ladder: Ladder,
        report: Callable[[Done], None],
    ) -> None:
        self.device = device
        self.ladder = ladder
        self._report = report
        self._contexts = ExitStack()
        self._turn = threading.Lock()  # held by whoever computes
        self._queue: SimpleQueue[Item | Job | None] = SimpleQueue()
        self._backlog = Backlog(ladder.largest)
        self._staging = Staging(device)
        self._thread = threading.Thread(target=self._run, name="gemmwire-device", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, work: Item | Job) -> None:
        self._queue.put(work)

    def stop(self) -> None:
        """Finish what is queued, then end the thread."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread ---

    def _run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # FlashInfer launches on the current device, whatever x is on
        with self._contexts:
            for job in self._jobs():
                try:
                    with self._turn, torch.inference_mode():
                        job.run()
                except Exception:  # a job tells its own waiters; the thread serves on
                    log.exception("a job failed on the device thread")

    def enter(self, context: AbstractContextManager[None]) -> None:
        """Have the rest of this thread's life run in a context; called by a job."""
        self._contexts.enter_context(context)

    def _jobs(self) -> Iterator[Job]:
        """Run batches until the queue ends; yield each job once the requests before it are done."""
        while True:
            work = self._collect()
            while self._backlog:
                self._run_batch()
                if not isinstance(work, Job) and work is not _END:
                    work = self._collect(block=False)
            if isinstance(work, Job):
                yield work
            elif work is _END:
                return

    def _collect(self, block: bool = True) -> Job | object | None:
        """Move waiting requests to the backlog, up to the first job or the end, which is returned."""
        try:
            while True:
                work = self._queue.get(block=block)
                if work is None:
                    return _END
                if isinstance(work, Job):
                    return work
                self._backlog.add(work)
                block = False
        except Empty:
            return None

    def _run_batch(self) -> None:
        batch, dropped = self._backlog.take()
        if dropped:
            self._report(Done(dropped, [None] * len(dropped)))
        if batch:
            with self._turn:
                done = self._forward(batch)
            self._report(done)

    # --- either thread, in its turn ---

    def compute_now(self, batch: list[Item]) -> Done | None:
        """Compute requests of one layer on this thread; None where that would take long, or is not our turn.

        The caller sees to it that nothing is queued that came before.
        """
        rows = sum(item.rows for item in batch)
        if self.device.type != "cpu" or rows > self.ladder.largest:
            return None
        bucket = self.ladder.bucket_for(rows)
        weight = batch[0].layer.routes.by_bucket[bucket].weight
        work = max(bucket, _READ_ONCE) * weight.n_pad * max(weight.k_pad, _WRITE_ONCE)
        if work > _NOW_BELOW:
            return None
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return self._forward(batch)
        finally:
            self._turn.release()

    def _forward(self, batch: list[Item]) -> Done:
        """Compute one batch of requests of one layer; an error of the backend is each request's outcome."""
        try:
            with torch.inference_mode():
                if batch[0].rows > self.ladder.largest:
                    return self._forward_chunks(batch[0])
                return self._forward_batch(batch)
        except Exception as error:  # what a kernel raises is the answer of its batch, not the thread's end
            return Done(batch, [error] * len(batch))

    def _forward_batch(self, batch: list[Item]) -> Done:
        began = time.monotonic_ns()
        layer = batch[0].layer
        rows = sum(item.rows for item in batch)
        bucket = self.ladder.bucket_for(rows)
        x = self._fill([_matrix(item) for item in batch], layer, rows, bucket)
        filled = time.monotonic_ns()
        out = self._compute(x, layer, bucket)
        computed = time.monotonic_ns()
        pieces = _split(out, batch, layer.spec.n)
        times = BatchTimes(began, filled - began, computed - filled, time.monotonic_ns() - computed)
        outcomes: list[Answer | Exception | None] = [
            _answer(item, y, layer, bucket, times) for item, y in zip(batch, pieces, strict=True)
        ]
        return Done(batch, outcomes, bucket, times)

    def _forward_chunks(self, item: Item) -> Done:
        """Each chunk at the largest bucket, the last one too: the answer names one bucket for all rows."""
        began = time.monotonic_ns()
        layer, source, bucket = item.layer, _matrix(item), self.ladder.largest
        y = torch.empty(item.rows, layer.spec.n, dtype=TORCH_DTYPES[item.datatype])
        start = forwards = 0
        for rows in self.ladder.chunks(item.rows):
            if not item.wanted(time.monotonic_ns()):
                return Done([item], [None])
            x = self._fill([source[start : start + rows]], layer, rows, bucket)
            y[start : start + rows].copy_(self._compute(x, layer, bucket)[:rows, : layer.spec.n])
            start += rows
            forwards += 1
        times = BatchTimes(began, 0, time.monotonic_ns() - began, 0)
        return Done([item], [_answer(item, y, layer, bucket, times)], bucket, times, forwards)

    def _fill(self, sources: list[Tensor], layer: Layer, rows: int, bucket: int) -> Tensor:
        """Rows side by side, rounded to BF16, and zeros below them: the bits depend on nothing earlier."""
        if len(sources) == 1 and rows == bucket and self._fits(sources[0], layer, bucket):
            return sources[0]
        x = self._staging.rows(layer.spec.k, layer.routes.by_bucket[bucket].weight.k_pad, bucket)
        start = 0
        for source in sources:
            x[start : start + len(source), : layer.spec.k].copy_(source)
            start += len(source)
        if rows < bucket:
            x[rows:].zero_()
        return x

    def _fits(self, source: Tensor, layer: Layer, bucket: int) -> bool:
        """Whether the bytes that came are already what a backend takes."""
        return (
            source.dtype is torch.bfloat16
            and layer.routes.by_bucket[bucket].weight.k_pad == layer.spec.k
            and self.device.type == "cpu"
            and source.data_ptr() % _ALIGNED == 0
        )

    def compute(self, layer: Layer, x: Tensor) -> Tensor:
        """x [m, K] -> y BF16 [m, N], each rows of at most the largest bucket as a request would get them."""
        return torch.cat([self._compute_rows(layer, rows) for rows in x.split(self.ladder.largest)])

    def _compute_rows(self, layer: Layer, x: Tensor) -> Tensor:
        rows = x.shape[0]
        bucket = self.ladder.bucket_for(rows)
        return self._compute(self._fill([x], layer, rows, bucket), layer, bucket)[:rows, : layer.spec.n].cpu()

    def _compute(self, x: Tensor, layer: Layer, bucket: int) -> Tensor:
        route = layer.routes.by_bucket[bucket]
        out = torch.empty(bucket, route.weight.n_pad, dtype=torch.bfloat16, device=self.device)
        route.backend.forward(x, route.weight, route.plan, out)
        return out


_END = object()


def _matrix(item: Item) -> Tensor:
    """The request's tensor as [rows, K], a view of the bytes that came."""
    view = memoryview(item.x.data)
    if view.readonly:  # numbers that came as JSON; torch takes writable memory only
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=TORCH_DTYPES[item.x.datatype]).view(item.rows, item.layer.spec.k)


def _split(out: Tensor, batch: list[Item], n: int) -> list[Tensor]:
    """The rows of each request, in its datatype."""
    if len(batch) == 1 and out.dtype is TORCH_DTYPES[batch[0].datatype] and out.shape == (batch[0].rows, n):
        return [out.cpu()]
    pieces = []
    start = 0
    for item in batch:
        pieces.append(out[start : start + item.rows, :n].to("cpu", TORCH_DTYPES[item.datatype]).contiguous())
        start += item.rows
    return pieces


def _answer(item: Item, y: Tensor, layer: Layer, bucket: int, times: BatchTimes) -> Answer:
    data = y.view(-1).view(torch.uint8).numpy().data
    queue_us = (times.began - item.arrived) // 1000
    return Answer(
        data,
        layer.version,
        layer.routes.by_bucket[bucket].backend.name,
        bucket,
        queue_us,
        times.device // 1000,
    )
