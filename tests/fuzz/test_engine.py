"""Requests, deadlines, refits, loads and unloads in any order, against a plain matmul a version."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import save_file
from torch import Tensor

from fuzz.effort import while_there_is_time
from gemmwire.wire import Tensor as WireTensor
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.checkpoint.float_layer import quantize_layer
from gemmwire_service.device import Job
from gemmwire_service.engine import State
from gemmwire_service.errors import (
    DeadlineExceeded,
    DeviceFailed,
    EngineError,
    ModelRefused,
    ModelUnknown,
    QueueFull,
    VersionConflict,
)
from gemmwire_service.loading import make_engine
from gemmwire_service.model_root import ModelRoot
from gemmwire_service.refit import Refit, Source
from gemmwire_service.repository import Repository
from http_calls import TORCH, datatype, raw
from oracle import assert_same_bits, reference, rounded_once, sparse
from serving import settings, until

N, K = 24, 64
MODELS, LAYERS = ("one", "two"), ("a", "b")
NAMES = tuple(f"{model}.{name}" for model in MODELS for name in LAYERS)
MAX_QUEUE = 12
# layer, rows, dtype, seconds until the deadline, seed of x
REQUESTS = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from([1, 1, 2, 3, 4, 5, 9]),
    st.sampled_from(sorted(TORCH)),
    st.sampled_from([None, None, None, 0.0, 0.0005, 30.0]),
    st.integers(0, 50),
)


@cache
def weight(seed: int) -> Tensor:
    return sparse(N, K, torch.Generator().manual_seed(seed))


@cache
def root() -> Path:
    """Models `one` and `two`, each with layers `a` and `b`: seeds 0 to 3."""
    place = Path(tempfile.mkdtemp(prefix="gemmwire-states-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    for index, model in enumerate(MODELS):
        (place / model).mkdir()
        tensors = {f"{name}.weight": weight(2 * index + at) for at, name in enumerate(LAYERS)}
        save_file(tensors, place / model / "model.safetensors")
    return place


def seed_of(model: str, layer: str) -> int:
    return 2 * MODELS.index(model) + LAYERS.index(layer)


@dataclass(eq=False)
class Asked:
    """One request, and every outcome it was told of."""

    layer: str
    x: Tensor
    deadline: bool
    item: Item | None = None
    outcomes: list[Answer | Exception | None] = field(default_factory=list)


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asked: list[Asked] = []
        self.doing: list[tuple[asyncio.Task[Any], Callable[[Any], None]]] = []
        self.weights: dict[tuple[str, int], int] = {}  # seed by layer and version
        self.gate: threading.Event | None = None
        self.loaded: set[str] = set()
        self.unloaded: set[str] = set()
        self.faults = 0
        self.faulty = False  # since the last time that all was settled
        real = Emulation.forward

        def forward(backend: Emulation, x: Tensor, *arguments: Any) -> None:
            if self.faults:
                self.faults -= 1
                raise RuntimeError("an illegal memory access was encountered")
            real(backend, x, *arguments)

        self.patch = mock.patch.object(Emulation, "forward", forward)
        self.patch.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        options = settings(
            model_root=str(root()), max_bucket=4, max_queue=MAX_QUEUE, cache_dir=str(root() / ".cache")
        )
        self.engine, loader, _, _ = make_engine(options, None)
        self.refit = Refit(self.engine)
        self.repository = Repository(self.engine, loader, self.refit, ModelRoot.of(str(root())))

        async def start() -> None:
            self.engine.start()
            while self.engine.state is State.LOADING:
                await asyncio.sleep(0.001)

        self.run(start())
        assert self.engine.failure is None, self.engine.failure
        for model in MODELS:
            self.load(model)
        self.settle()

    # --- what may happen ---

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def ask(self, requests: list[tuple[str, int, str, float | None, int]]) -> None:
        """All in one turn of the event loop."""

        async def submit() -> None:
            for request in requests:
                self.submit(*request)

        self.run(submit())

    def submit(self, layer: str, m: int, dtype: str, patience: float | None, seed: int) -> None:
        found = self.engine.layers.get(layer)
        if found is None:
            return
        x = sparse(m, K, torch.Generator().manual_seed(seed)).to(TORCH[dtype])
        asked = Asked(layer, x, patience is not None and patience < 1)
        deadline = None if patience is None else time.monotonic_ns() + int(patience * 1e9)
        tensor = WireTensor("x", datatype(x), tuple(x.shape), bytearray(raw(x)))

        def done(item: Item) -> None:
            asked.outcomes.append(item.outcome)

        try:
            asked.item = self.engine.submit(found, tensor, m, datatype(x), done, deadline)
        except QueueFull:
            assert self.engine.waiting >= MAX_QUEUE
        except DeadlineExceeded:
            assert asked.deadline
        else:
            self.asked.append(asked)

    @rule(which=st.integers(0, 30))
    def leave(self, which: int) -> None:
        """Chosen by a number, for how many there are depends on the machine's pace."""
        asked = self.asked[which % len(self.asked)] if self.asked else None
        if asked is not None and asked.item is not None and not asked.outcomes:
            asked.item.leave()

    @precondition(lambda self: self.gate is None)
    @rule()
    def hold(self) -> None:
        gate = self.gate = threading.Event()

        async def post() -> None:
            self.engine.post(Job(lambda: gate.wait(60)))  # type: ignore[arg-type]

        self.run(post())

    @rule()
    def release(self) -> None:
        if self.gate is not None:
            self.gate.set()
            self.gate = None

    @rule(times=st.integers(1, 30))
    def turn(self, times: int) -> None:
        async def turns() -> None:
            for _ in range(times):
                await asyncio.sleep(0)

        self.run(turns())

    @rule(seconds=st.sampled_from([0.001, 0.01]))
    def wait(self, seconds: float) -> None:
        """Long enough for threads to read a weight, or for a deadline to pass."""
        self.run(asyncio.sleep(seconds))

    @rule(alone=st.booleans())
    def be_alone(self, alone: bool) -> None:
        self.engine.alone = lambda: alone

    @rule()
    def fail_once(self) -> None:
        self.faults, self.faulty = 1, True

    @rule(model=st.sampled_from(MODELS))
    def load(self, model: str) -> None:
        def loaded(layers: Any) -> None:
            self.loaded.add(model)
            for layer, version in layers:
                self.serve(layer, version, seed_of(model, layer.rpartition(".")[2]))

        async def load() -> Any:
            return [(layer.name, layer.version) for layer in await self.repository.load(model)]

        self.start(load(), loaded)

    @rule(model=st.sampled_from(MODELS))
    def unload(self, model: str) -> None:
        self.start(self.repository.unload(model), lambda _: self.unloaded.add(model))

    @rule(model=st.sampled_from(MODELS), source=st.sampled_from(MODELS))
    def refit_all(self, model: str, source: str) -> None:
        def refitted(results: Any) -> None:
            for each in results:
                self.serve(each.layer, each.version, seed_of(source, each.layer.rpartition(".")[2]))

        async def refit() -> Any:
            try:
                return await self.repository.refit(model, source, None)
            except DeviceFailed as error:
                # A fault between two layers: the first has its new weight, as the message says, and keeps it.
                if str(error).startswith("1 of 2 layers have new weights"):
                    first = self.engine.layers[f"{model}.{LAYERS[0]}"]
                    self.serve(first.name, first.version, seed_of(source, LAYERS[0]))
                raise

        self.start(refit(), refitted)

    @rule(
        layer=st.sampled_from(NAMES),
        seed=st.integers(4, 50),
        version=st.sampled_from([None, None, 1, 2]),
    )
    def refit_one(self, layer: str, seed: int, version: int | None) -> None:
        found = self.engine.layers.get(layer)
        if found is not None:
            source = Source(found, partial(quantize_layer, layer, weight(seed), None), "a test")
            self.start(
                self.refit.refit(source, version), lambda done: self.serve(done.layer, done.version, seed)
            )

    # --- what must hold ---

    def start(self, work: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
        async def begin() -> None:
            self.doing.append((asyncio.create_task(work), done))

        self.run(begin())

    def serve(self, layer: str, version: int, seed: int) -> None:
        assert (layer, version) not in self.weights, f"{layer} had two weights in version {version}"
        self.weights[layer, version] = seed

    @invariant()
    def counts_are_within_their_bounds(self) -> None:
        assert 0 <= self.engine.waiting <= MAX_QUEUE
        assert self.engine.waiting_rows >= self.engine.waiting
        assert all(len(asked.outcomes) <= 1 for asked in self.asked)

    @rule()
    def settle(self) -> None:
        """Everything comes to its end, and each answer is that of the version it names."""
        self.release()
        doing, self.doing = self.doing, []
        self.loaded, self.unloaded = set(), set()
        self.run(asyncio.wait_for(_all([task for task, _ in doing]), 60))
        for task, done in doing:
            error = task.exception()
            if error is None:
                done(task.result())
            else:
                self.check_refusal(error)
        served = {layer.model for layer in self.engine.layers.values()}
        assert not served & (self.unloaded - self.loaded), "a model that was unloaded is found"
        until(self.turned_to_nothing, "requests wait for ever")
        asked, self.asked = self.asked, []
        for each in asked:
            self.check(each)
        assert (self.engine.waiting_rows, self.engine.held.total) == (0, 0)
        self.faults, self.faulty = 0, False

    def turned_to_nothing(self) -> bool:
        self.turn(3)
        return self.engine.waiting == 0

    def check_refusal(self, error: BaseException) -> None:
        """Of a load, unload or refit: the other one of a race came first, or a fault was made."""
        expected = (VersionConflict, ModelUnknown, *((DeviceFailed, ModelRefused) if self.faulty else ()))
        assert isinstance(error, (*expected, EngineError) if self.faulty else expected), repr(error)

    def check(self, asked: Asked) -> None:
        assert asked.item is not None
        if asked.item.left:
            assert len(asked.outcomes) <= 1
        else:
            assert len(asked.outcomes) == 1, "a request without an answer"
        for outcome in asked.outcomes:
            if isinstance(outcome, Answer):
                y = torch.frombuffer(bytearray(outcome.data), dtype=asked.x.dtype).view(-1, N)
                w = weight(self.weights[asked.layer, outcome.version])
                assert_same_bits(y, rounded_once(reference(asked.x, w)).to(asked.x.dtype))
            elif isinstance(outcome, DeadlineExceeded):
                assert asked.deadline
            else:
                assert isinstance(outcome, DeviceFailed), repr(outcome)
                assert self.faulty

    def teardown(self) -> None:
        try:
            if hasattr(self, "repository"):
                self.settle()
                self.run(self.engine.stop())
        finally:
            self.patch.stop()
            self.loop.close()


async def _all(tasks: list[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


def test_every_request_gets_the_answer_of_the_version_it_names() -> None:
    """Guards: an answer of another weight, twice or never, whatever comes between; counts that drift."""
    options = hypothesis_settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    while_there_is_time(lambda: run_state_machine_as_test(Engine, settings=options))
