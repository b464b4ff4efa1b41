"""Whether a series of samples grows: the median of its last quarter against that of its first.

Both are quarters of what follows the time that is given for warming up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SETTLE_S = 120.0
LEAST_SAMPLES = 12  # three in a quarter
QUIET_CORES = 0.5  # that other processes may keep busy, for a latency to be the server's own
MIB = 1 << 20


@dataclass(frozen=True)
class Rule:
    """What may be added from the first quarter to the last: the larger of a part of it, and so many units.

    `quiet`: samples taken while other processes kept the cores busy do not count.
    """

    name: str
    title: str
    unit: str
    scale: float
    part: float
    units: float
    quiet: bool = False

    def limit(self, first: float) -> float:
        return first + max(self.part * first, self.units * self.scale)

    def shown(self, value: float) -> str:
        scaled = value / self.scale
        return f"{scaled:.1f} {self.unit}" if self.unit else f"{scaled:g}"

    def allowed(self) -> str:
        units = f"{self.units:g} {self.unit}".strip()
        return f"{100 * self.part:g} % or {units}" if self.part else units


RULES = (
    Rule("rss", "resident memory", "MiB", MIB, 0.03, 8),
    Rule("fds", "file descriptors beside the clients' connections", "", 1, 0, 2),
    Rule("threads", "threads", "", 1, 0, 2),
    Rule("p50_ms", "p50", "ms", 1, 0.5, 10, quiet=True),
    Rule("p99_ms", "p99", "ms", 1, 1.0, 50, quiet=True),
)


@dataclass(frozen=True)
class Verdict:
    rule: Rule
    first: float
    last: float

    @property
    def grew(self) -> bool:
        return self.last > self.rule.limit(self.first)

    def sentence(self) -> str:
        rule = self.rule
        return (
            f"{rule.title} grew from {rule.shown(self.first)} to {rule.shown(self.last)}, "
            f"more than {rule.allowed()}"
        )


def judged(samples: Sequence[dict[str, Any]], settle_s: float = SETTLE_S) -> list[Verdict]:
    """One verdict a rule, but for those that too few samples after the first `settle_s` seconds count for."""
    settled = [sample for sample in samples if sample["at"] > settle_s]
    quiet = [sample for sample in settled if sample["others"] <= QUIET_CORES]
    return [
        verdict
        for rule in RULES
        if (verdict := _verdict(rule, [sample[rule.name] for sample in (quiet if rule.quiet else settled)]))
    ]


def _verdict(rule: Rule, values: Sequence[float]) -> Verdict | None:
    size = len(values) // 4
    if len(values) < LEAST_SAMPLES:
        return None
    return Verdict(rule, statistics.median(values[:size]), statistics.median(values[-size:]))
