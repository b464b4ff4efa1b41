"""CUDA on a CPU: streams that do nothing until somebody waits, and then in the worst order that events allow.

A copy, a memset and a replay are queued as on a device. Where a program misses an event, sooner or later a
seed comes at which two streams do their work in the wrong order, and the bytes are wrong.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemmwire_service.buckets import Ladder
from gemmwire_service.capture import Run
from gemmwire_service.graphs import Graphs
from gemmwire_service.mail import SLOTS, Mailbox
from gemmwire_service.pipeline import Machine
from gemmwire_service.program import Statics

Ready = Callable[[], bool]


@dataclass
class _Event:
    asked: int = 0  # how often it was recorded by the host
    reached: int = 0  # and by the stream


class ScriptedStreams:
    """Work runs at once until `lazy` is set. `failing` is raised by the next wait for an event."""

    copy_in, compute, copy_out = 1, 2, 3

    def __init__(self, seed: int = 0) -> None:
        self.lazy = False
        self.failing: Exception | None = None
        self.copies = 0
        self._random = random.Random(seed)
        self._queues: dict[int, deque[tuple[Ready, Run]]] = {stream: deque() for stream in (1, 2, 3)}
        self._events: list[_Event] = []

    def event(self) -> int:
        self._events.append(_Event())
        return len(self._events) - 1

    def queue(self, stream: int, run: Run, ready: Ready = lambda: True) -> None:
        if self.lazy:
            self._queues[stream].append((ready, run))
        else:
            assert ready()
            run()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copies += 1
        self.queue(stream, lambda: _drop(ctypes.memmove(target, source, nbytes)))

    def zero(self, target: int, nbytes: int, stream: int) -> None:
        self.queue(stream, lambda: _drop(ctypes.memset(target, 0, nbytes)))

    def record(self, event: int, stream: int) -> None:
        found = self._events[event]
        found.asked += 1
        number = found.asked

        def reach() -> None:
            found.reached = max(found.reached, number)

        self.queue(stream, reach)

    def wait(self, stream: int, event: int) -> None:
        found = self._events[event]
        number = found.asked
        self.queue(stream, lambda: None, lambda: found.reached >= number)

    def passed(self, event: int) -> bool:
        """Some work is done whenever somebody asks."""
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
        found = self._events[event]
        if found.reached < found.asked:
            self._step()
        return found.reached >= found.asked

    def synchronize(self, event: int) -> None:
        if self.failing is not None:
            error, self.failing = self.failing, None
            raise error
        found = self._events[event]
        while found.reached < found.asked:
            self._step()

    def synchronize_all(self) -> None:
        while any(self._queues.values()):
            self._step()

    def _step(self) -> None:
        able = [queue for queue in self._queues.values() if queue and queue[0][0]()]
        assert able, "every stream waits for another"
        self._random.choice(able).popleft()[1]()

    def pinned(self, elements: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.full((elements,), float("nan"), dtype=torch.bfloat16)

    on_device = pinned


def _drop(value: object) -> None:
    pass


Fault = Callable[[int, Run], None]
"""Called in place of a replay, with the number of the graph and the run that was captured."""


@dataclass
class ScriptedRecorder:
    """Graphs that run their calls again, on the compute stream. `bytes_each` is what one takes."""

    streams: ScriptedStreams
    bytes_each: int = 0
    bytes_transient: int = 0
    took: float = 1e6  # us of a replay
    fault: Fault | None = None
    refuse: Callable[[int], Exception | None] = lambda number: None
    recorded: int = 0
    taken: int = field(default=0)

    def record(self, run: Run) -> Run:
        self.recorded += 1
        number = self.recorded
        error = self.refuse(number)
        if error is not None:
            raise error
        self.taken += self.bytes_each

        fault = self.fault

        def replay() -> None:
            self.streams.queue(self.streams.compute, run if fault is None else lambda: fault(number, run))

        return replay

    def used(self) -> int:
        return self.taken

    def transient(self, run: Run) -> int:
        run()
        return self.bytes_transient

    def microseconds(self, run: Run) -> float:
        return self.took


class ScriptedMail:
    """The kernels at the ends of a graph, as they are told in mail.py."""

    def bring(self, entries: Tensor, turn: Tensor, x: Tensor, slots: int) -> None:
        source, _, count, _ = entries.view(slots, 4)[int(turn) % slots].tolist()
        assert count <= x.numel()
        ctypes.memmove(x.data_ptr(), source, 2 * count)
        x.view(-1)[count:] = 0

    def send(self, entries: Tensor, turn: Tensor, done: Tensor, y: Tensor, slots: int) -> None:
        _, target, _, count = entries.view(slots, 4)[int(turn) % slots].tolist()
        assert count <= y.numel()
        ctypes.memmove(target, y.data_ptr(), 2 * count)
        turn += 1


def machine(
    ladder: Ladder, budget: int = 1 << 20, seed: int = 0, mail: bool = False, **recorder: object
) -> Machine:
    """With `mail`, graphs copy for themselves."""
    streams = ScriptedStreams(seed)
    scripted = ScriptedRecorder(streams, **recorder)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    box = Mailbox(ScriptedMail(), torch.zeros(4 * SLOTS, dtype=torch.int64), cpu) if mail else None
    return Machine(streams, Graphs(cpu, Statics(cpu, ladder.largest), scripted, budget, box))
