"""What the server has done since it started, whichever layers it serves by now.

Counted on the event loop alone and in plain numbers, so that nothing needs a lock. Answers are counted many
at a time: one by one, each would find the counters out of the processor's caches, and pay for it (4 us of a
request instead of 0.4). `metrics` and `status` make documents of it when they are asked.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .backlog import Item
from .done import Done
from .layer import Layer
from .stats import BatchTimes

log = logging.getLogger("gemmwire.traffic")

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]

_DECADES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
BOUNDS = (*(each * step // 2 for each in _DECADES for step in (2, 5, 10)), 10_000_000_000, 30_000_000_000)
"""Of the histograms, in ns: 10 us to 30 s. A time belongs to the first bound that is not less."""

STAGES = ("receive", "queue", "device", "send", "total")
_NEVER = 1 << 63
_MOST_REASONS = 64  # the codes of all errors are fewer
_AT_ONCE = 256  # answers that are counted together
_BOUNDS = np.array(BOUNDS)
_RECENT = 20  # refusals that are told one by one


class Histogram:
    __slots__ = ("counts", "ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # the last: longer than every bound
        self.ns = 0

    def add(self, ns: Numbers) -> None:
        """A time each."""
        found = np.bincount(np.searchsorted(_BOUNDS, ns), minlength=len(self.counts)).tolist()
        self.counts = [count + more for count, more in zip(self.counts, found, strict=True)]
        self.ns += int(ns.sum())


class Stages:
    """Of answered requests that were computed; `receive` to `send` are one after the other, in `total`."""

    __slots__ = STAGES

    def __init__(self) -> None:
        self.receive, self.queue, self.device = Histogram(), Histogram(), Histogram()
        self.send, self.total = Histogram(), Histogram()

    def add(self, began: Numbers, arrived: Numbers, start: Numbers, device: Numbers, ended: Numbers) -> None:
        """Of one request each: when it began, arrived at the engine, was begun with, and ended; and how long
        the device took."""
        self.receive.add(arrived - began)
        self.queue.add(start - arrived)
        self.device.add(device)
        self.send.add(ended - start - device)
        self.total.add(ended - began)

    def items(self) -> list[tuple[str, Histogram]]:
        return [(name, getattr(self, name)) for name in STAGES]


@dataclass(slots=True)
class Forwards:
    """The forwards of one bucket, of all layers. `rows` of `places` were asked for, the rest is zeros."""

    bucket: int
    count: int = 0
    requests: int = 0
    rows: int = 0
    ns: int = 0

    @property
    def places(self) -> int:
        return self.count * self.bucket


class Finished(NamedTuple):
    """An infer request that was answered or refused. Times are monotonic ns.

    `began`: its head had come; `item`: None where it did not get to the engine; `reason`: the code of its
    error, "" for none.
    """

    layer: str  # "" where it named none that is served
    status: int
    reason: str
    headers: dict[bytes, bytes]
    began: int
    ended: int
    item: Item | None

    @property
    def ns(self) -> int:
        return self.ended - self.began

    def stages(self) -> list[tuple[str, int, int]]:
        """(name, start, end) of what it went through, in order."""
        item = self.item
        if item is None:
            return [("receive", self.began, self.ended)]
        receive = ("receive", self.began, item.arrived)
        if item.times is None:
            return [receive, ("queue", item.arrived, self.ended)]
        start, end = item.times.began, item.times.began + item.times.device
        return [receive, ("queue", item.arrived, start), ("device", start, end), ("send", end, self.ended)]


class Refused(NamedTuple):
    """An infer request that was refused, at a time of Unix's; `layer` as in Finished."""

    at: float
    layer: str
    status: int
    reason: str


@dataclass(slots=True)
class Traffic:
    """`watchers` hear of each request that took `watch_from_ns` or that the server failed on (5xx)."""

    codes: dict[int, int] = field(default_factory=dict)  # of infer requests, by HTTP status
    unserved: dict[int, int] = field(default_factory=dict)  # those of them that named no layer that is served
    rejects: dict[str, int] = field(default_factory=dict)  # refusals of any route, by the error's code
    recent: deque[Refused] = field(default_factory=lambda: deque(maxlen=_RECENT))
    left: int = 0  # requests whose client was gone before the answer
    refits: int = 0
    buckets: dict[int, Forwards] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)
    began: float = field(default_factory=time.time)
    watch_from_ns: int = _NEVER
    watchers: list[Callable[[Finished], None]] = field(default_factory=list)
    # Answers that are not counted yet: the codes to count each among with its status, and its times as
    # Stages.add has them.
    _codes: list[tuple[dict[int, int], int]] = field(default_factory=list)
    _times: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def watch(self, watcher: Callable[[Finished], None], from_ns: int) -> None:
        """`watcher` may hear of more than it asked for: of what another watches."""
        self.watchers.append(watcher)
        self.watch_from_ns = min(self.watch_from_ns, from_ns)

    def finished(
        self,
        layer: Layer | None,
        status: int,
        reason: str,
        headers: dict[bytes, bytes],
        began: int,
        item: Item | None,
    ) -> None:
        """An infer request has its answer; `layer` None where it named none that is served."""
        now = time.monotonic_ns()
        codes = self.unserved if layer is None else layer.stats.codes
        if item is None or item.times is None or reason:
            self._count_code(codes, status)
            if reason:
                self.reject(reason)
                self.recent.append(Refused(time.time(), layer.name if layer else "", status, reason))
        else:
            times = item.times
            self._codes.append((codes, status))
            self._times.append((began, item.arrived, times.began, times.device, now))
            if len(self._times) >= _AT_ONCE:
                self.count_answers()
        if now - began >= self.watch_from_ns or status >= 500:
            self._tell(Finished(layer.name if layer else "", status, reason, headers, began, now, item))

    def count_answers(self) -> None:
        """To be called before the numbers are read."""
        for codes, status in self._codes:
            self._count_code(codes, status)
        if self._times:
            self.stages.add(*np.array(self._times).T)
        self._codes, self._times = [], []

    def _count_code(self, codes: dict[int, int], status: int) -> None:
        codes[status] = codes.get(status, 0) + 1
        self.codes[status] = self.codes.get(status, 0) + 1

    def reject(self, reason: str) -> None:
        if reason not in self.rejects and len(self.rejects) >= _MOST_REASONS:
            reason = "other"
        self.rejects[reason] = self.rejects.get(reason, 0) + 1

    def count_forwards(self, done: Done, times: BatchTimes) -> None:
        of_bucket = self.buckets.get(done.bucket)
        if of_bucket is None:
            of_bucket = self.buckets[done.bucket] = Forwards(done.bucket)
        items = done.items
        of_bucket.count += done.forwards
        of_bucket.requests += len(items)
        of_bucket.rows += items[0].rows if len(items) == 1 else sum([item.rows for item in items])
        of_bucket.ns += times.compute_input + times.compute_infer + times.compute_output

    def _tell(self, finished: Finished) -> None:
        for watcher in self.watchers:
            try:
                watcher(finished)
            except Exception:  # the request is answered, and others wait
                log.exception("a request could not be reported")
