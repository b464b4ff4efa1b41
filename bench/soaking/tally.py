"""What was counted, and a sample of it every few seconds."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field

from soaking.connection import Connection
from soaking.server import busy, look

MOST_SENTENCES = 20


@dataclass(frozen=True)
class Sample:
    """`at`: seconds from the start of the traffic, `rate`: right answers a second, times in milliseconds.

    `fds` are those that are no client's connection; `others`: cores that other processes kept busy.
    """

    at: float
    rss: int
    anon: int
    file: int
    fds: int
    connections: int
    threads: int
    p50_ms: float
    p99_ms: float
    rate: float
    refused: int
    failed: int
    late: int
    malformed: int
    refits: int
    others: float


@dataclass
class Tally:
    """`counts` from the start, `times` of the right answers since the last sample, in seconds."""

    counts: Counter[str] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def right(self, form: str, seconds: float) -> None:
        self.counts["answered"] += 1
        self.counts[f"form {form}"] += 1
        self.times.append(seconds)

    def broken(self, kind: str, sentence: str) -> None:
        """`kind`: wrong or failed. The first sentences are kept."""
        self.counts[kind] += 1
        if len(self.problems) < MOST_SENTENCES:
            self.problems.append(sentence)


class Sampler:
    """Of one server, from when this is made."""

    def __init__(self, tally: Tally, pid: int) -> None:
        self._tally, self._pid = tally, pid
        self._began = self._last = time.perf_counter()
        self._counted = Counter(tally.counts)
        self._busy = busy(pid, os.getpid())

    def sample(self) -> Sample:
        now, counts = time.perf_counter(), Counter(self._tally.counts)
        seconds, new = now - self._last, counts - self._counted
        times, self._tally.times = sorted(self._tally.times), []
        process, used = look(self._pid), busy(self._pid, os.getpid())
        others = (used[0] - self._busy[0] - (used[1] - self._busy[1])) / seconds
        self._last, self._counted, self._busy = now, counts, used
        return Sample(
            at=round(now - self._began, 1),
            rss=process.rss,
            anon=process.anon,
            file=process.file,
            fds=process.fds - Connection.opened,
            connections=Connection.opened,
            threads=process.threads,
            p50_ms=quantile(times, 0.5),
            p99_ms=quantile(times, 0.99),
            rate=round(len(times) / seconds, 1),
            others=round(max(others, 0.0), 2),
            **{name: new[name] for name in ("refused", "failed", "late", "malformed", "refits")},
        )


def quantile(times: list[float], part: float) -> float:
    """Of sorted seconds, in milliseconds; 0 where there are none."""
    return round(1e3 * times[int(part * len(times))], 2) if times else 0.0
