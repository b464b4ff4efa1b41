"""CUDA graphs: the forward of one bucket of a layer, captured once and then one call for the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from .capture import Run, capture
from .driver import driver
from .layer import EagerBucket, GraphFacts, Layer
from .mail import Mailbox
from .program import Program, Statics
from .replay_check import judge
from .tuning import reason, refuse_lost

log = logging.getLogger("gemmwire.graphs")

_TIMED = 10
WARM_UPS = 2  # what a first call loads, compiles or allocates must not happen in a capture
MIB = 1 << 20
LEAST = 64 << 10  # bytes that a graph is counted with


class Recorder(Protocol):
    """Makes a graph of calls; on a CPU a test stands in for it."""

    def record(self, run: Run) -> Run:
        """What replays the calls of `run`. Raises what a capture raises."""

    def used(self) -> int:
        """Bytes of device memory in use."""

    def transient(self, run: Run) -> int:
        """Bytes that `run` allocates and gives back, which a graph keeps."""

    def microseconds(self, run: Run) -> float:
        """What one of several runs in a row takes."""


class CudaRecorder:
    """Captures on one stream into one pool, which all graphs share."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        # Each is kept as long as what replays it.
        self._graphs: WeakKeyDictionary[Run, torch.cuda.CUDAGraph] = WeakKeyDictionary()
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()  # torch gives up a pool with its last graph
        try:
            graph = capture(run, self._stream, self._pool)
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()
            raise
        if not hasattr(graph, "raw_cuda_graph_exec"):
            return graph.replay
        # It holds no random state, which is what torch's own replay sees to.
        replay = partial(driver().launch, int(graph.raw_cuda_graph_exec()), self._stream.cuda_stream)
        self._graphs[replay] = graph
        return replay

    def used(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def transient(self, run: Run) -> int:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return torch.cuda.max_memory_allocated(self._device) - before

    def microseconds(self, run: Run) -> float:
        self._stream.synchronize()
        began = time.perf_counter()
        for _ in range(_TIMED):
            run()
        self._stream.synchronize()
        return 1e6 * (time.perf_counter() - began) / _TIMED


def fitting(needs: dict[int, int], held: int, each: int, left: int) -> set[int]:
    """The buckets whose graphs fit into `left` bytes, small ones first: for them a graph gains most.

    `needs`: bucket -> bytes of the pool that its graph uses; the pool is shared, and `held` large already.
    `each`: bytes of any one graph.
    """
    chosen: set[int] = set()
    pool = held
    for bucket in sorted(needs):
        pool = max(pool, needs[bucket])
        if pool - held + (len(chosen) + 1) * each > left:
            break
        chosen.add(bucket)
    return chosen


@dataclass
class Graphs:
    """The graphs of one device, within `budget` bytes; for the device thread."""

    device: torch.device
    statics: Statics
    recorder: Recorder
    budget: int
    mail: Mailbox | None = None
    used: int = 0
    _pool: int = 0  # the largest need that was captured
    _each: int = LEAST  # bytes of the last graph, as a guess at the next
    _live: int = 0  # programs that run as a graph

    def capture(self, layer: Layer) -> dict[int, Program]:
        """The programs of a layer that is not served yet; `layer.graphs` says what became of each bucket.

        Errors: BackendError where the device is lost, and what an eager forward raises.
        """
        routes = layer.routes.by_bucket
        programs = {bucket: Program.of(route, bucket, self.statics) for bucket, route in routes.items()}
        used, eager = self.used, {}
        if self.budget:
            needs = {bucket: self._warm(programs[bucket]) for bucket in sorted(programs, reverse=True)}
            fits = fitting(needs, self._pool, self._each, self.budget - self.used)
            eager = {bucket: self._too_large(bucket, needs) for bucket in programs if bucket not in fits}
            for bucket in sorted(fits, reverse=True):
                failure = self._try(programs[bucket], needs[bucket])
                if failure is not None:
                    eager[bucket] = failure
        else:
            eager = dict.fromkeys(programs, "graphs are switched off (--graph-budget-bytes 0)")
        _tell(layer.name, eager)
        buckets = tuple(EagerBucket(bucket, eager[bucket]) for bucket in sorted(eager))
        layer.graphs = GraphFacts(buckets, self.used - used)
        return programs

    def release(self, layer: Layer) -> None:
        """Let go of the programs of a layer that is served no more. The pool is as large as it was, while any
        graph uses it."""
        self._live -= sum(program.captured for program in layer.programs.values())
        self._pool = self._pool if self._live else 0
        self.used = max(self.used - (layer.graphs.nbytes if layer.graphs else 0), self._pool)
        layer.programs.clear()

    def _warm(self, program: Program) -> int:
        """Eager runs, and the bytes that the last one allocated on its way."""
        for _ in range(WARM_UPS):
            program.eager()
        if self.mail is not None and program.small:
            posted = _posted(self.mail, program, partial(program.mailed, self.mail))
            for _ in range(WARM_UPS):
                posted()
        return self.recorder.transient(program.eager)

    def _try(self, program: Program, need: int) -> str | None:
        """Capture one bucket and let it run as a graph, or say why not."""
        if self.used >= self.budget:
            return f"the graphs before it took {self.used} of {self.budget} bytes (--graph-budget-bytes)"
        before = self.recorder.used()
        mail = self.mail if program.small else None
        try:
            replay = self.recorder.record(program.eager if mail is None else partial(program.mailed, mail))
            trial = replay if mail is None else _posted(mail, program, replay)
            judge(program.x, program.y, program.bucket, program.eager, trial)
        except Exception as error:  # a bucket without its graph is slower, and serves
            refuse_lost(self.device, error)
            if mail is not None:
                mail.restart()
            return reason(error)
        program.run, program.captured, program.mail = replay, True, mail
        program.microseconds = self.recorder.microseconds(trial)
        del trial  # it holds memory of its own
        # A graph takes some at its first replay, of pieces that the driver takes for several.
        taken = max(LEAST, self.recorder.used() - before)
        self._each = max(LEAST, taken - max(0, need - self._pool))
        self._pool = max(self._pool, need)
        self.used += taken
        self._live += 1
        return None

    def _too_large(self, bucket: int, needs: dict[int, int]) -> str:
        return (
            f"its graph needs some {(needs[bucket] + self._each) / MIB:.0f} MiB, and of the "
            f"{self.budget / MIB:.0f} MiB for graphs {self.used / MIB:.0f} are used; raise "
            "--graph-budget-bytes"
        )


def _posted(mail: Mailbox, program: Program, run: Run) -> Run:
    """A run that takes the x that is there and gives y back, by way of other memory."""
    x, y = program.x.rows(program.bucket), program.y
    source, target = torch.empty_like(x), torch.empty_like(y)

    def posted() -> None:
        source.copy_(x)
        mail.post(source.data_ptr(), target.data_ptr(), x.numel(), y.numel())
        run()
        y.copy_(target)

    return posted


def _tell(name: str, eager: dict[int, str]) -> None:
    """One line for all buckets of one reason."""
    by_reason: dict[str, list[int]] = {}
    for bucket in sorted(eager):
        by_reason.setdefault(eager[bucket], []).append(bucket)
    for why, buckets in by_reason.items():
        log.warning("layer %s, M=%s: runs without a CUDA graph: %s", name, _listed(buckets), why)


def _listed(buckets: Iterable[int]) -> str:
    return ", ".join(map(str, buckets))
