"""The device: every forward, load and refit, one at a time, in the order of one queue.

It has a thread of its own. On a CUDA device a batch is sent and received, and others can be sent in between
(`Pipeline`). Where a batch is so small that waking the thread would take longer than the forward, the event
loop sees to it itself, if it is the device's turn: it computes on a CPU (`compute_now`), and sends to a CUDA
device and receives from it (`start_now`, `receive_now`) while the thread has nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from .backlog import Backlog, Item
from .buckets import Ladder
from .done import Done
from .errors import DeviceLost
from .host import Host, Threads, work
from .layer import Layer
from .pipeline import Machine, Pipeline
from .tuning import loss, reason

log = logging.getLogger("gemmwire.device")

# Of `work`, what the event loop may do: as much as takes as long as waking a thread does, 0.1 ms; and some ms
# where nobody else is expected, who would wait for the device in any case.
_NOW_UP_TO = 1 << 24
_ALONE_UP_TO = 1 << 29
_LONGEST_NOW_NS = 5_000_000  # that such forwards took so far; without BF16 instructions it is ten times that
_EFFICIENT = 64  # rows from which a CPU's matmul takes a time in proportion to them

GRAPH_BUDGET = 4 << 30  # bytes


@dataclass(frozen=True)
class Job:
    """Work that is not a forward (load, refit): it runs once the requests that came before it are done.

    `failed` hears of it where the device cannot be set up for it; what `run` raises it tells its own waiters.
    """

    run: Callable[[], None]
    failed: Callable[[Exception], None] | None = None


class Device:
    """A thread that computes. `report` is called on it with every `Done`; it must hand over and return.

    `machine` is what a CUDA device is driven by; it is made on the thread.
    """

    def __init__(
        self,
        device: torch.device,
        ladder: Ladder,
        report: Callable[[Done], None],
        *,
        graph_budget: int = GRAPH_BUDGET,
        threads: Threads | None = None,
        machine: Callable[[], Machine] | None = None,
    ) -> None:
        self.device = device
        self.ladder = ladder
        self.lost: DeviceLost | None = None
        self._report = report
        self._contexts = ExitStack()
        self._turn = threading.Lock()  # held by whoever computes
        self._queue: SimpleQueue[Item | Job | None] = SimpleQueue()
        self._backlog = Backlog(_together(device, ladder))
        self._host = Host(ladder, threads)
        if machine is None and device.type == "cuda":
            machine = lambda: Machine.of(device, ladder, graph_budget)  # noqa: E731
        self._machine = machine
        self._pipeline: Pipeline | None = None
        self._under_way = 0  # batches that the thread has sent
        self._under_way_now = 0  # and the event loop; never both at a time
        self._bound: set[int] = set()  # threads that compute
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
        with self._contexts, torch.inference_mode():
            for job in self._jobs():
                try:
                    with self._turn:
                        self._set_up(job)
                        job.run()
                except Exception as error:  # a job tells its own waiters; the thread serves on
                    log.exception("a job failed on the device thread")
                    if self._note_loss(error):
                        self._report(Done([], [], lost=self.lost))

    def _set_up(self, job: Job) -> None:
        """At the first job: what a CUDA device is driven by belongs to the thread that drives it."""
        if self._machine is None or self._pipeline is not None:
            return
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # FlashInfer launches on it, whatever x is on
            self._pipeline = Pipeline(self._machine(), self.ladder)
        except Exception as error:
            if job.failed is not None:
                job.failed(error)
            raise

    def enter(self, context: AbstractContextManager[None]) -> None:
        """Have the rest of this thread's life run in a context; called by a job."""
        self._contexts.enter_context(context)

    def release(self, layer: Layer) -> None:
        """Give up what runs a layer that is served no more; called by a job."""
        if self._pipeline is not None:
            self._pipeline.release(layer)

    def leave(self) -> None:
        """Leave every context entered so far; called by a job."""
        self._contexts.close()

    def _jobs(self) -> Iterator[Job]:
        """Run batches until the queue ends; yield each job once the requests before it are done."""
        while True:
            work = self._collect(block=not self._under_way)
            while self._backlog:
                self._run_batch()
                if not isinstance(work, Job) and work is not _END:
                    work = self._collect(block=False)
            if isinstance(work, Job):
                self._receive_all()
                yield work
            elif work is _END:
                self._receive_all()
                return
            elif self._pipeline and self._under_way:
                self._receive(self._pipeline)

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
        if not batch:
            return
        if self.lost is not None:
            self._report(self._refused(batch, self.lost))
        elif self._pipeline is None:
            self._report(self._trying(batch, lambda: self._host.forward(batch)))
        elif batch[0].rows > self.ladder.largest:
            self._receive_all()
            self._report(self._trying(batch, self._pipeline.forward_chunks, batch[0]))
        else:
            self._send(self._pipeline, batch)

    def _send(self, pipeline: Pipeline, batch: list[Item]) -> None:
        try:
            while self.lost is None and pipeline.full_for(batch):
                self._receive(pipeline)
            if self.lost is None:
                with self._turn:
                    pipeline.send(batch)
                self._under_way += 1
            else:
                self._report(self._refused(batch, self.lost))
        except Exception as error:
            self._report(self._failed(batch, error))

    def _receive(self, pipeline: Pipeline) -> None:
        self._under_way -= 1
        self._report(self._trying(pipeline.oldest(), pipeline.receive))

    def _receive_all(self) -> None:
        while self._pipeline and self._under_way:
            self._receive(self._pipeline)

    def _trying(self, batch: list[Item], run: Callable[..., Done], *arguments: Item) -> Done:
        try:
            with self._turn:
                return run(*arguments)
        except Exception as error:
            return self._failed(batch, error)

    # --- failures ---

    def _failed(self, batch: list[Item], error: Exception) -> Done:
        """What a kernel raises is its batch's answer, and where the device is lost that of all others."""
        if self._note_loss(error):
            self._under_way = self._under_way_now = 0
            batch = batch + (self._pipeline.drop() if self._pipeline is not None else [])
        return Done(batch, [self.lost or error] * len(batch), lost=self.lost)

    def _refused(self, batch: list[Item], lost: DeviceLost) -> Done:
        return Done(batch, [lost] * len(batch), lost=lost)

    def _note_loss(self, error: Exception) -> bool:
        """Whether the device is lost; nothing is computed on it from then on."""
        if self.lost is None and isinstance(error, DeviceLost):
            self.lost = error
        why = None if self.lost is not None else loss(self.device, error)
        if why is not None:
            log.critical("%s is lost (%s)", self.device, why, exc_info=error)
            self.lost = DeviceLost(
                f"{self.device} is lost to the server ({why}), after {reason(error)}; the server ends with "
                "status 1, to be started again: send the request to another, or again once it is ready"
            )
        return self.lost is not None

    # --- the event loop, while nothing is queued that came before ---

    def compute_now(self, batch: list[Item], alone: bool = False) -> Done | None:
        """On a CPU: compute requests of one layer on this thread; None where that would take long, or is not
        our turn. `alone`: no others are expected meanwhile."""
        rows = sum(item.rows for item in batch)
        if self.overlaps or rows > self.ladder.largest or self.lost is not None:
            return None
        bucket = self.ladder.bucket_for(rows)
        most = _ALONE_UP_TO if alone else _NOW_UP_TO
        layer = batch[0].layer
        if work(bucket, layer.routes.by_bucket[bucket].weight) > most:
            return None
        before = layer.stats.buckets.get(bucket)
        if before is not None and before.ns > before.forwards * _LONGEST_NOW_NS:
            return None
        if not self._turn.acquire(blocking=False):
            return None
        try:
            with torch.inference_mode():
                return self._host.forward(batch)
        except Exception as error:
            return self._failed(batch, error)
        finally:
            self._turn.release()

    @property
    def overlaps(self) -> bool:
        """Whether a batch can be sent before the last one has been received, as on a CUDA device."""
        return self._machine is not None

    @property
    def full(self) -> bool:
        return self._pipeline is not None and self._pipeline.full

    def quick(self, batch: list[Item]) -> bool:
        """Whether `start_now` is for requests of one layer."""
        return self.lost is None and self._pipeline is not None and self._pipeline.quick(batch)

    def start_now(self, batch: list[Item]) -> Done | None:
        """Send requests to the device, which is not `full`; what came of them where that has failed."""
        pipeline = self._pipeline
        try:
            if pipeline is None:
                raise RuntimeError("the device has not been set up")
            self._bind()
            with self._turn:
                pipeline.send(batch)
            self._under_way_now += 1
        except Exception as error:
            return self._failed(batch, error)
        return None

    def receive_now(self, wait: bool) -> Done | None:
        """What came of the oldest requests that `start_now` sent; None where nothing is under way, or, but
        with `wait`, has arrived."""
        pipeline = self._pipeline
        if pipeline is None or not self._under_way_now:
            return None
        try:
            if not wait and not pipeline.arrived:
                return None
        except Exception as error:
            self._under_way_now = 0
            return self._failed(pipeline.drop(), error)
        self._under_way_now -= 1
        return self._trying(pipeline.oldest(), pipeline.receive)

    def _bind(self) -> None:
        """The driver works on the context of the calling thread, which torch sets at its first call there."""
        if self.device.type == "cuda" and threading.get_ident() not in self._bound:
            torch.cuda.set_device(self.device)
            torch.cuda.current_stream(self.device).query()
            self._bound.add(threading.get_ident())

    # --- in a job ---

    def capture(self, layer: Layer) -> None:
        """On a CUDA device: make the graphs of a layer that is not served yet. Errors: BackendError."""
        if self._pipeline is not None:
            self._pipeline.capture(layer)

    def allocate(self) -> None:
        """On a CUDA device: make the staging memory for all layers so far, before a request needs it."""
        if self._pipeline is not None:
            self._pipeline.allocate()

    def compute(self, layer: Layer, x: Tensor) -> Tensor:
        """x [m, K] -> y BF16 [m, N], each rows of at most the largest bucket as a request would get them."""
        compute = self._host.compute if self._pipeline is None else self._pipeline.compute
        return torch.cat([compute(layer, rows) for rows in x.split(self.ladder.largest)])


def _together(device: torch.device, ladder: Ladder) -> int:
    """Up to how many rows the requests of one forward may have.

    On a CPU a row of a larger forward costs no less, and while it runs the answers of a smaller one are sent.
    """
    if device.type != "cpu" or ladder.largest <= _EFFICIENT:
        return ladder.largest
    return ladder.bucket_for(_EFFICIENT)


_END = object()
