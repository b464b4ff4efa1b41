"""A CUDA device as the device thread uses it: batches of requests sent to it, and received as answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .backlog import Item
from .buckets import Ladder
from .capture import capture_stream
from .done import Done, answers
from .graphs import CudaRecorder, Graphs
from .layer import Layer
from .mail import mailbox
from .program import Program, Statics
from .staging import DEPTH, Slot, Staging, arrived, give_back, lend
from .stats import BatchTimes
from .streams import CudaStreams, Streams
from .tensors import TORCH_DTYPES, as_bytes, matrix

_QUICK_US = 200  # about twice what it takes to hand a batch to another thread, and its answers back
_BYTES_A_US = 20_000  # of x and y, to and from the device, and once more on the host
_COPY_BELOW = 1 << 20  # bytes; a larger copy lets go of the interpreter, which costs more than a small one


class _Sent(NamedTuple):
    batch: list[Item]
    layer: Layer
    bucket: int
    began: int
    filled: int


@dataclass(frozen=True, eq=False)
class Machine:
    """What a pipeline runs on."""

    streams: Streams
    graphs: Graphs

    @classmethod
    def of(cls, device: torch.device, ladder: Ladder, graph_budget: int) -> Machine:
        stream = capture_stream(device)
        statics = Statics(device, ladder.largest)
        streams = CudaStreams(device, stream)
        recorder = CudaRecorder(device, stream)
        return cls(streams, Graphs(device, statics, recorder, graph_budget, mailbox(device)))


class Pipeline:
    """For one thread at a time. `len` is the number of batches under way."""

    def __init__(self, machine: Machine, ladder: Ladder) -> None:
        self._machine = machine
        self._ladder = ladder
        self._staging = Staging(machine.streams)
        self._sent: deque[_Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    def capture(self, layer: Layer) -> None:
        """Programs for a layer that is not served yet. Errors: as `Graphs.capture`."""
        layer.programs = self._machine.graphs.capture(layer)
        widest = max(program.widest for program in layer.programs.values())
        self._staging.make_room(self._ladder.largest * widest)

    def release(self, layer: Layer) -> None:
        """Let go of the programs of a layer that is served no more."""
        self._machine.graphs.release(layer)

    def allocate(self) -> None:
        """Make the pinned memory for the layers captured so far. Nothing may be under way."""
        self._staging.allocate()

    def full_for(self, batch: list[Item]) -> bool:
        """Whether a batch has to wait until one under way has been received."""
        rows = _rows(batch)
        return self._staging.full_for(self._program(batch[0].layer, rows), rows)

    def send(self, batch: list[Item]) -> None:
        """Start a batch of one layer that fits the largest bucket."""
        began = time.monotonic_ns()
        layer, rows = batch[0].layer, _rows(batch)
        program = self._program(layer, rows)
        filled = 0

        def fill(slot: Slot) -> None:
            nonlocal filled
            _fill(slot, batch, layer.spec.k, program.x.k_pad)
            filled = time.monotonic_ns()

        self._staging.send(program, rows, fill)
        self._sent.append(_Sent(batch, layer, program.bucket, began, filled))

    def quick(self, batch: list[Item]) -> bool:
        """Whether a batch is there and back about as soon as another thread would have sent it."""
        layer, rows = batch[0].layer, _rows(batch)
        if rows > self._ladder.largest:
            return False
        program = layer.programs.get(self._ladder.bucket_for(rows))
        if program is None or not program.captured:
            return False  # a kernel library may keep to the thread it was loaded on
        nbytes = 2 * rows * (program.x.k_pad + program.n)
        return program.microseconds + nbytes / _BYTES_A_US < _QUICK_US

    @property
    def full(self) -> bool:
        return len(self._sent) >= DEPTH

    @property
    def arrived(self) -> bool:
        """Whether the oldest batch has."""
        return self._staging.arrived

    def oldest(self) -> list[Item]:
        return self._sent[0].batch

    def receive(self) -> Done:
        """Wait for the oldest batch. Errors: what the device raised; it is then under way no more."""
        sent = self._sent.popleft()
        flight = self._staging.receive()
        computed = time.monotonic_ns()
        n, batch = sent.layer.spec.n, sent.batch
        if all(item.datatype == "BF16" for item in batch):
            pieces = _cut(lend(flight), [2 * item.rows * n for item in batch])
        else:
            pieces = _converted(arrived(flight), batch)
            give_back(flight)
        times = BatchTimes(
            sent.began, sent.filled - sent.began, computed - sent.filled, time.monotonic_ns() - computed
        )
        return Done(batch, answers(batch, pieces, sent.layer, sent.bucket, times), sent.bucket, times)

    def forward_chunks(self, item: Item) -> Done:
        """A request of more rows than a bucket; each chunk at the largest, so that all rows have one. Nothing
        may be under way."""
        began = time.monotonic_ns()
        layer, bucket = item.layer, self._ladder.largest
        y = torch.empty(item.rows, layer.spec.n, dtype=TORCH_DTYPES[item.datatype])
        pieces = matrix(item).split(bucket)
        targets = deque(y.split(bucket))
        wanted = True
        for piece in pieces:
            wanted = wanted and item.wanted(time.monotonic_ns())
            if wanted:
                self._send_chunk(layer, piece, targets)
        while self._staging.flights:
            self._receive_chunk(targets)
        if not wanted:
            return Done([item], [None])
        times = BatchTimes(began, 0, time.monotonic_ns() - began, 0)
        done = answers([item], [as_bytes(y)], layer, bucket, times)
        return Done([item], done, bucket, times, len(pieces))

    def _send_chunk(self, layer: Layer, piece: Tensor, targets: deque[Tensor]) -> None:
        program = self._program(layer, self._ladder.largest)
        while self._staging.full_for(program, len(piece)):
            self._receive_chunk(targets)
        self._staging.send(program, len(piece), partial(_fill_rows, piece, program.x.k_pad))

    def _receive_chunk(self, targets: deque[Tensor]) -> None:
        flight = self._staging.receive()
        targets.popleft().copy_(arrived(flight))
        give_back(flight)

    def drop(self) -> list[Item]:
        """Forget what is under way on a device that is lost; its requests."""
        items = [item for sent in self._sent for item in sent.batch]
        self._sent.clear()
        self._staging.abandon()
        return items

    def compute(self, layer: Layer, x: Tensor) -> Tensor:
        """x [m, K], at most a bucket -> y BF16 [m, N] on the CPU. Nothing may be under way."""
        program = self._program(layer, len(x))
        flight = self._staging.send(program, len(x), partial(_fill_rows, x, program.x.k_pad))
        self._staging.receive()
        y = arrived(flight).clone()
        give_back(flight)
        return y

    def _program(self, layer: Layer, rows: int) -> Program:
        bucket = self._ladder.bucket_for(rows)
        program = layer.programs.get(bucket)
        if program is None:  # of a layer that was never captured, or has been released
            program = Program.of(layer.routes.by_bucket[bucket], bucket, self._machine.graphs.statics)
            layer.programs[bucket] = program
        return program


def _rows(batch: Sequence[Item]) -> int:
    return batch[0].rows if len(batch) == 1 else sum(item.rows for item in batch)


def _fill(slot: Slot, batch: list[Item], k: int, k_pad: int) -> None:
    """The requests' rows side by side, rounded to BF16, zero beyond K."""
    if k == k_pad and all(item.x.datatype == "BF16" and item.nbytes < _COPY_BELOW for item in batch):
        start = 0
        for item in batch:
            end = start + item.nbytes
            slot.raw[start:end] = memoryview(item.x.data).cast("B")
            start = end
        return
    rows = slot.rows(_rows(batch), k_pad)
    start = 0
    for item in batch:
        rows[start : start + item.rows, :k].copy_(matrix(item))
        start += item.rows
    rows[:, k:].zero_()


def _fill_rows(source: Tensor, k_pad: int, slot: Slot) -> None:
    rows = slot.rows(len(source), k_pad)
    rows[:, : source.shape[1]].copy_(source)
    rows[:, source.shape[1] :].zero_()


def _cut(data: memoryview, sizes: list[int]) -> list[memoryview]:
    if len(sizes) == 1:
        return [data]
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return pieces


def _converted(y: Tensor, batch: list[Item]) -> list[memoryview]:
    """The rows of each request in its datatype, in memory of their own."""
    pieces = y.split([item.rows for item in batch])
    return [
        as_bytes(piece.to(TORCH_DTYPES[item.datatype], copy=True))
        for item, piece in zip(batch, pieces, strict=True)
    ]
