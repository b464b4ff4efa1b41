"""Requests that wait for the device: one line a layer, served in turn, coalesced into batches.

The device thread owns it; nothing here is locked.
"""

from __future__ import annotations

import time
from asyncio import Future, Task
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gemmwire.wire import Tensor

from .layer import Layer


class Answer(NamedTuple):
    """y of one request: `data` holds [rows, N] elements of the asked datatype. Times in microseconds."""

    data: memoryview
    version: int
    backend: str
    bucket: int
    queue_us: int
    device_us: int


@dataclass(eq=False)
class Item:
    """One request at the engine. `deadline` is monotonic ns; None waits for ever."""

    layer: Layer
    x: Tensor
    rows: int
    datatype: str
    future: Future[Answer]
    deadline: int | None = None
    on_wait: Callable[[Item], None] | None = None  # heard on the event loop when the item goes to the device
    left: bool = False  # the client closed its connection
    watcher: Task[None] | None = None
    arrived: int = field(default_factory=time.monotonic_ns)

    @property
    def nbytes(self) -> int:
        return memoryview(self.x.data).nbytes

    def wanted(self, now: int) -> bool:
        """False once the caller has left or its deadline has passed."""
        return not self.future.done() and (self.deadline is None or now < self.deadline)


class Backlog:
    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, item: Item) -> None:
        self._lines.setdefault(item.layer.name, deque()).append(item)

    def take(self) -> tuple[list[Item], list[Item]]:
        """-> (batch, dropped): the next layer's waiting requests that fit one forward, in order of arrival.

        A request of more rows than a forward holds goes alone (it is chunked). The layer then moves to the
        end of the turn, so that a busy layer cannot starve another.
        """
        name, line = self._lines.popitem(last=False)
        batch, dropped = self._fill(line)
        if line:
            self._lines[name] = line
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
