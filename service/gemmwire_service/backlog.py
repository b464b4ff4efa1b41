"""Requests that wait for the device: one line a layer, served in turn, coalesced into batches.

The device thread owns it; nothing here is locked.
"""

from __future__ import annotations

import time
from asyncio import TimerHandle
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gemmwire.wire import Buffer, Tensor

from .layer import Layer
from .stats import BatchTimes


class Answer(NamedTuple):
    """y of one request: `data` holds [rows, N] elements of the asked datatype. Times in microseconds."""

    data: Buffer
    version: int
    backend: str
    bucket: int
    queue_us: int
    device_us: int


@dataclass(eq=False)
class Item:
    """One request at the engine. `deadline` is monotonic ns; None waits for ever.

    It is settled once, on the event loop; `on_done` hears of it there, `on_wait` if the item goes to the
    device instead of being computed at once. The device thread only asks whether it is still `wanted`.
    """

    layer: Layer
    x: Tensor
    rows: int
    datatype: str
    on_done: Callable[[Item], None]
    deadline: int | None = None
    on_wait: Callable[[Item], None] | None = None
    outcome: Answer | Exception | None = None
    left: bool = False  # nobody waits for it any more
    timer: TimerHandle | None = None  # of its deadline
    times: BatchTimes | None = None  # of the forward that its answer is from
    held: int = 0  # bytes that are counted for it, its answer's among them
    arrived: int = field(default_factory=time.monotonic_ns)

    @property
    def nbytes(self) -> int:
        return memoryview(self.x.data).nbytes

    @property
    def done(self) -> bool:
        return self.left or self.outcome is not None

    def wanted(self, now: int) -> bool:
        """False once it is settled, its caller has left or its deadline has passed."""
        return not self.done and (self.deadline is None or now < self.deadline)

    def settle(self, outcome: Answer | Exception) -> None:
        """The answer, or why there is none; what comes after the first, or after `leave`, is dropped."""
        if not self.done:
            self.outcome = outcome
            self._stop_timer()
            self.on_done(self)

    def leave(self) -> None:
        """The caller is gone: it hears nothing more, and the device drops the item if it can still."""
        self.left = True
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Backlog:
    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        # By the layer itself: one that was loaded again has its name from that which waits to be let go.
        self._lines: OrderedDict[int, deque[Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, item: Item) -> None:
        self._lines.setdefault(id(item.layer), deque()).append(item)

    def take(self) -> tuple[list[Item], list[Item]]:
        """-> (batch, dropped): the next layer's waiting requests that fit one forward, in order of arrival.

        A request of more rows than a forward holds goes alone (it is chunked). The layer then moves to the
        end of the turn, so that a busy layer cannot starve another.
        """
        layer, line = self._lines.popitem(last=False)
        batch, dropped = self._fill(line)
        if line:
            self._lines[layer] = line
        return batch, dropped

    def _fill(self, line: deque[Item]) -> tuple[list[Item], list[Item]]:
        now = time.monotonic_ns()
        batch: list[Item] = []
        dropped: list[Item] = []
        rows = 0
        while line and (not batch or rows + line[0].rows <= self._max_rows):
            item = line.popleft()
            if item.wanted(now):
                batch.append(item)
                rows += item.rows
            else:
                dropped.append(item)
        return batch, dropped
