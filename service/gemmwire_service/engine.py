"""Layers by name, and the bounded line of requests in front of the one device thread.

Everything but the device thread's own work runs on the event loop, so counters and states need no lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

from gemmwire.wire import ITEMSIZE, Tensor

from .backlog import Answer, Item
from .device import Device, Job
from .done import Done
from .errors import DeadlineExceeded, DeviceFailed, DeviceLost, Draining, NotReady, QueueFull
from .held import Held
from .here import Here
from .layer import Layer
from .traffic import Traffic

log = logging.getLogger("gemmwire.engine")

_ANY = 1 << 62


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class Engine:
    """`load` makes the layers, on the device thread; `on_loaded` hears of its end on the event loop, and
    again if the device is lost later (`failure`)."""

    def __init__(
        self,
        make_device: Callable[[Callable[[Done], None]], Device],
        load: Callable[[Device], Iterable[Layer]],
        *,
        max_queue: int,
        max_queue_bytes: int,
        max_queue_rows: int = _ANY,
        on_loaded: Callable[[Engine], None] | None = None,
    ) -> None:
        self.layers: dict[str, Layer] = {}
        self.state = State.LOADING
        self.failure: Exception | None = None
        self.traffic = Traffic()
        self.waiting = 0
        self.waiting_rows = 0
        self.held = Held(max_queue_bytes)
        self._jobs = 0  # posted and not done
        self._max_queue = max_queue
        self._max_queue_rows = max_queue_rows
        self._new: list[Item] = []  # submitted in this turn of the event loop
        self._device = make_device(self._report)
        self._here = Here(self._device, self._finish, self._put)
        self._load = load
        self._on_loaded = on_loaded
        self._loop: asyncio.AbstractEventLoop | None = None
        # Asked of the HTTP server: a request that is alone is not kept for others to join.
        self.alone: Callable[[], bool] = lambda: False
        # Entered while the answers of one forward are given out, for a transport that sends them together.
        self.answering: AbstractContextManager[object] = nullcontext()

    # --- life ---

    def start(self) -> None:
        """Start the device thread and loading; returns at once. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._device.start()
        self._device.put(Job(self._load_layers, lambda error: self._call(self._loaded, {}, error)))

    async def stop(self) -> None:
        """Refuse what comes, answer what waits, end the device thread."""
        self.state = State.DRAINING
        self._put(self._take_new())
        await asyncio.to_thread(self._device.stop)

    def _load_layers(self) -> None:
        failure: Exception | None = None
        layers: dict[str, Layer] = {}
        try:
            for layer in self._load(self._device):
                layers[layer.name] = layer
                if self.state is State.DRAINING:
                    break
        except Exception as error:  # it is told to whoever started the service, in `_loaded`
            failure = error
        self._call(self._loaded, layers, failure)

    def _loaded(self, layers: dict[str, Layer], failure: Exception | None) -> None:
        self.failure = failure
        if self.state is State.LOADING:
            self.layers = layers if failure is None else {}
            self.state = State.READY if failure is None else State.FAILED
        if self._on_loaded is not None and self.state is not State.DRAINING:
            self._on_loaded(self)

    # --- requests ---

    def refuse_unless_ready(self) -> None:
        """Errors: NotReady, Draining."""
        if self.state is State.DRAINING:
            raise Draining(
                "The server is shutting down and takes no new requests; ask another, or try again later"
            )
        if self.state is not State.READY:
            raise NotReady(
                f"The server is {self.state.value}, not ready; wait until /v2/health/ready answers 200"
            )

    def submit(
        self,
        layer: Layer,
        x: Tensor,
        rows: int,
        datatype: str,
        on_done: Callable[[Item], None],
        deadline: int | None = None,
        on_wait: Callable[[Item], None] | None = None,
    ) -> Item:
        """Queue x [rows, K] of `layer`; the item is settled with y as `datatype`, [rows, N].

        rows >= 1; x.data holds exactly rows * K elements. `on_done` may hear before this returns; `on_wait`
        hears if the answer is not there at once.
        Errors: QueueFull, NotReady, Draining, DeadlineExceeded; later, as the item's outcome, DeviceFailed
        and DeadlineExceeded.
        """
        self.refuse_unless_ready()
        if deadline is not None and time.monotonic_ns() >= deadline:
            raise _expired()
        item = Item(layer, x, rows, datatype, on_done, deadline, on_wait)
        self._admit(item)
        self._new.append(item)
        if self.alone():
            self._pass_on(alone=True)
        elif len(self._new) == 1:
            # After the other requests that this turn of the event loop brings, which then share a forward.
            self._running_loop.call_soon(self._pass_on)
        return item

    @property
    def waiting_bytes(self) -> int:
        """Of the requests that wait, and of the answers they will have."""
        return self.held.waiting

    @property
    def device(self) -> Device:
        """What runs on it belongs into a job."""
        return self._device

    def exchange(self, old: Iterable[Layer], new: Iterable[Layer]) -> None:
        """Requests from now on find `new` and not `old`; those that found a layer keep it to their end."""
        gone = {layer.name for layer in old}
        kept = {name: layer for name, layer in self.layers.items() if name not in gone}
        self.layers = kept | {layer.name: layer for layer in new}

    def post(self, job: Job) -> None:
        """Have the device run a job after every request submitted so far."""
        self._put(self._take_new())
        self._jobs += 1
        self._device.put(Job(lambda: self._run_job(job)))

    def _run_job(self, job: Job) -> None:
        try:
            job.run()
        finally:
            self._call(self._job_done)

    def _job_done(self) -> None:
        self._jobs -= 1

    def _pass_on(self, alone: bool = False) -> None:
        """Give the requests of this turn to the device, or compute them here if that is faster."""
        new = self._take_new()
        if not new:
            return None
        now = time.monotonic_ns()
        nothing_before = len(new) + self._here.count == self.waiting and not self._jobs
        if nothing_before and self._device.overlaps:
            return self._here.take(new, self._running_loop)
        if nothing_before and all(item.layer is new[0].layer and item.wanted(now) for item in new):
            done = self._device.compute_now(new, alone)
            if done is not None:
                return self._finish(done)
        return self._put(new)

    def _take_new(self) -> list[Item]:
        new, self._new = self._new, []
        return new

    def _put(self, new: list[Item]) -> None:
        items = [*self._here.drain(), *new]
        for item in items:  # all of them before a timer or a caller's `on_wait` could raise
            self._device.put(item)
        for item in items:
            if item.deadline is not None:
                self._expire_at(item, item.deadline)
            if item.on_wait is not None:
                item.on_wait(item)

    def _expire_at(self, item: Item, deadline: int) -> None:
        """The answer to a deadline that passes is there at once, however long the device is busy."""
        if not item.done:
            delay = (deadline - time.monotonic_ns()) / 1e9
            item.timer = self._running_loop.call_later(delay, lambda: item.settle(_expired()))

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise NotReady("The engine has not been started; call start() on the event loop first")
        return self._loop

    def _admit(self, item: Item) -> None:
        if self.waiting >= self._max_queue:
            raise QueueFull(
                f"{self.waiting} requests wait, which is the bound; try again later, or raise --max-queue",
                expected=f"< {self._max_queue}",
                got=self.waiting,
            )
        if self.waiting and self.waiting_rows + item.rows > self._max_queue_rows:
            raise QueueFull(
                f"{self.waiting_rows} rows wait and {item.rows} more pass the bound of "
                f"{self._max_queue_rows}; try again later, or raise --max-queue-rows",
                expected=f"<= {self._max_queue_rows}",
                got=self.waiting_rows + item.rows,
            )
        item.held = item.nbytes + item.rows * item.layer.spec.n * ITEMSIZE[item.datatype]
        self.held.refuse(item.held)
        self.waiting += 1
        self.waiting_rows += item.rows
        self.held.waiting += item.held

    # --- answers ---

    def _report(self, done: Done) -> None:
        self._call(self._finish, done)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Run on the event loop, from the device thread; a loop that is gone has nobody waiting."""
        try:
            self._running_loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop has ended; nobody waits for this answer")

    def _finish(self, done: Done) -> None:
        self.waiting -= len(done.items)
        self.waiting_rows -= sum([item.rows for item in done.items])
        self.held.waiting -= sum([item.held for item in done.items])
        if done.times is not None:
            done.items[0].layer.stats.count_batch(done.bucket, done.times, done.forwards)
            self.traffic.count_forwards(done, done.times)
        with self.answering:
            answered = [
                item
                for item, outcome in zip(done.items, done.outcomes, strict=True)
                if self._settle(item, outcome, done)
            ]
            if answered and done.times is not None:
                rows, arrived = sum([item.rows for item in answered]), [item.arrived for item in answered]
                answered[0].layer.stats.count_answered(rows, arrived, done.times)
        if done.lost is not None:
            self._device_lost(done.lost)

    def _device_lost(self, error: DeviceLost) -> None:
        """Not ready from now on; whoever started the service hears why it has to end."""
        if self.state is State.READY:
            self.state = State.FAILED
            self.failure = error
            if self._on_loaded is not None:
                self._on_loaded(self)

    def _settle(self, item: Item, outcome: Answer | Exception | None, done: Done) -> bool:
        """Whether it has its answer."""
        stats = item.layer.stats
        answered = False
        if item.done or outcome is None:
            stats.count_failure(item.arrived)
            settled: Answer | Exception = _expired()
        elif isinstance(outcome, Answer) and done.times is not None:
            answered = True
            item.times = done.times
            settled = outcome
        elif isinstance(outcome, DeviceLost):
            stats.count_failure(item.arrived)
            settled = outcome
        else:
            stats.count_failure(item.arrived)
            log.error("layer %s failed on the device", item.layer.name, exc_info=_exception(outcome))
            settled = DeviceFailed(
                f"The device failed on layer {item.layer.name!r} ({type(outcome).__name__}); "
                "the server's log has the details"
            )
        try:
            item.settle(settled)
        except Exception:  # of whoever waits for it: the others of the batch still get theirs
            log.exception("an answer of layer %s could not be passed on", item.layer.name)
        return answered


def _exception(outcome: object) -> BaseException | None:
    return outcome if isinstance(outcome, BaseException) else None


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded(
        "The request's deadline passed before its answer was there; allow more time, or send less"
    )
