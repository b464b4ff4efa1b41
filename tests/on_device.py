"""A device thread without an engine: requests are put to it by hand, and what it reports is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from gemmwire.wire import Tensor as WireTensor
from gemmwire_service.backends import Selection
from gemmwire_service.backends.base import Backend, LayerSpec, Plan
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device, Job
from gemmwire_service.done import Done
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.pipeline import Machine
from gemmwire_service.routes import Route, Routes

NAMES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}


def served_layer(
    name: str, backend: Backend, weight: MxWeight, device: torch.device, ladder: Ladder
) -> Layer:
    """A layer that one backend runs at every bucket, by its first plan."""
    prepared = backend.prepare(weight, device)
    by_bucket = {bucket: Route(backend, prepared, backend.plans(bucket)[0]) for bucket in ladder.buckets}
    routes = Routes(Selection(backend, ()), by_bucket, ())
    return Layer(LayerSpec(name, weight.n, weight.k, weight.bias is not None), routes, "test", "F32")


def request(layer: Layer, x: Tensor, datatype: str | None = None) -> Item:
    """x [m, k] as it comes from the wire; the answer in `datatype`, else in x's."""
    own = NAMES[x.dtype]
    data = bytearray(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    tensor = WireTensor("x", own, tuple(x.shape), data)
    return Item(layer, tensor, len(x), datatype or own, lambda item: None)


def tensor(answer: Answer, item: Item) -> Tensor:
    """The y of an answer, a view of the memory that it came in."""
    dtype = next(dtype for dtype, name in NAMES.items() if name == item.datatype)
    data = bytearray(answer.data) if memoryview(answer.data).readonly else answer.data
    return torch.frombuffer(data, dtype=dtype).view(item.rows, item.layer.spec.n)


@dataclass
class Rig:
    """A running device."""

    device: Device
    reports: SimpleQueue[Done] = field(default_factory=SimpleQueue)
    outcomes: dict[int, Answer | Exception | None] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=list)

    def job(self, run: Callable[[], None]) -> None:
        """Run on the device thread, after what was put before; what it raises is raised here."""
        errors: SimpleQueue[BaseException | None] = SimpleQueue()

        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                errors.put(error)
                raise
            errors.put(None)

        self.device.put(Job(guarded))
        error = errors.get(timeout=120)
        if error is not None:
            raise error

    def capture(self, *layers: Layer) -> None:
        def run() -> None:
            for layer in layers:
                self.device.capture(layer)
            self.device.allocate()

        self.job(run)

    def answers(self, items: Sequence[Item]) -> list[Answer]:
        """Put all and wait for all. What the device raised for one is raised."""
        answers = []
        for outcome in self.outcomes_of(items):
            if not isinstance(outcome, Answer):
                raise outcome or AssertionError("a request was dropped")
            answers.append(outcome)
        return answers

    def outcomes_of(self, items: Sequence[Item]) -> list[Answer | Exception | None]:
        for item in items:
            self.device.put(item)
        while any(id(item) not in self.outcomes for item in items):
            self._take()
        return [self.outcomes.pop(id(item)) for item in items]

    def _take(self) -> None:
        try:
            done = self.reports.get(timeout=60)
        except Empty:
            raise AssertionError("the device did not report a request") from None
        if done.times is not None:
            self.buckets.append(done.bucket)
        for item, outcome in zip(done.items, done.outcomes, strict=True):
            self.outcomes[id(item)] = outcome

    def infer(self, layer: Layer, x: Tensor, datatype: str | None = None) -> Tensor:
        item = request(layer, x, datatype)
        return tensor(self.answers([item])[0], item)


@contextmanager
def running(
    device: torch.device,
    ladder: Ladder,
    *,
    graph_budget: int = 1 << 30,
    machine: Callable[[], Machine] | None = None,
) -> Iterator[Rig]:
    reports: SimpleQueue[Done] = SimpleQueue()
    rig = Rig(Device(device, ladder, reports.put, graph_budget=graph_budget, machine=machine), reports)
    rig.device.start()
    try:
        yield rig
    finally:
        rig.device.stop()


def eager(layer: Layer, x: Tensor, bucket: int, device: torch.device) -> Tensor:
    """y BF16 [m, n] by the backend alone, of BF16 x [m, k]."""
    route = layer.routes.by_bucket[bucket]
    rows = torch.zeros(bucket, route.weight.k_pad, dtype=torch.bfloat16)
    rows[: len(x), : x.shape[1]] = x
    out = torch.empty(bucket, route.weight.n_pad, dtype=torch.bfloat16, device=device)
    plan: Plan = route.plan
    route.backend.forward(rows.to(device), route.weight, plan, out)
    return out[: len(x), : layer.spec.n].cpu()
