"""What a layer has done, in the terms of the protocol's statistics extension. Times in nanoseconds.

Counted on the event loop alone, so that it needs no lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """`ns`: of all of them together."""
        self.count += count
        self.ns += ns

    def document(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


class BatchTimes(NamedTuple):
    """One forward: when it began (monotonic ns) and what each stage took."""

    began: int
    compute_input: int
    compute_infer: int
    compute_output: int

    @property
    def device(self) -> int:
        return self.compute_input + self.compute_infer + self.compute_output


@dataclass(slots=True)
class Stages:
    """The sums of BatchTimes over forwards."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    forwards: int = 0  # a batch that is chunked is several

    @property
    def ns(self) -> int:
        return self.compute_input.ns + self.compute_infer.ns + self.compute_output.ns

    def add(self, times: BatchTimes, forwards: int = 1, count: int = 1) -> None:
        """`count`: of requests that each had all of these times."""
        self.forwards += forwards
        _, to_device, computing, back = times
        self.compute_input.add(count * to_device, count)
        self.compute_infer.add(count * computing, count)
        self.compute_output.add(count * back, count)

    def document(self) -> dict[str, dict[str, int]]:
        return {
            "compute_input": self.compute_input.document(),
            "compute_infer": self.compute_infer.document(),
            "compute_output": self.compute_output.document(),
        }


@dataclass
class LayerStats:
    inferences: int = 0
    executions: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    stages: Stages = field(default_factory=Stages)
    buckets: dict[int, Stages] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)  # of infer requests, by HTTP status

    def count_batch(self, bucket: int, times: BatchTimes, forwards: int = 1) -> None:
        """One batch of one bucket, in one forward unless chunked; rows are counted in `count_answered`."""
        self.executions += forwards
        stages = self.buckets.get(bucket)
        if stages is None:
            stages = self.buckets[bucket] = Stages()
        stages.add(times, forwards)

    def count_answered(self, rows: int, arrived: list[int], times: BatchTimes) -> None:
        """Requests answered: they arrived then (monotonic ns), with so many rows, and shared one forward."""
        count, since = len(arrived), sum(arrived)
        self.inferences += rows
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.add(count * time.monotonic_ns() - since, count)
        self.queue.add(count * times.began - since, count)
        self.stages.add(times, 1, count)

    def count_failure(self, arrived: int) -> None:
        self.fail.add(time.monotonic_ns() - arrived)

    def document(self, name: str, version: int) -> dict[str, object]:
        """The layer's entry in `model_stats`."""
        return {
            "name": name,
            "version": str(version),
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {
                "success": self.success.document(),
                "fail": self.fail.document(),
                "queue": self.queue.document(),
                **self.stages.document(),
                "cache_hit": Duration().document(),
                "cache_miss": Duration().document(),
            },
            "batch_stats": [
                {"batch_size": bucket, **stages.document()} for bucket, stages in sorted(self.buckets.items())
            ],
        }
