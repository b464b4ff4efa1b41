"""What a layer has done, in the terms of the protocol's statistics extension. Times in nanoseconds.

Counted on the event loop alone, so that it needs no lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass
class Duration:
    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        self.count += count
        self.ns += ns

    def document(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(frozen=True)
class BatchTimes:
    """One forward: when it began (monotonic ns) and what each stage took."""

    began: int
    compute_input: int
    compute_infer: int
    compute_output: int

    @property
    def device(self) -> int:
        return self.compute_input + self.compute_infer + self.compute_output


@dataclass
class LayerStats:
    inferences: int = 0
    executions: int = 0
    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    stages: dict[str, Duration] = field(default_factory=lambda: {stage: Duration() for stage in STAGES})
    batches: dict[int, dict[str, Duration]] = field(default_factory=dict)

    def count_batch(self, bucket: int, times: BatchTimes) -> None:
        """One forward of one bucket; its rows are counted request by request in `count_success`."""
        self.executions += 1
        stages = self.batches.get(bucket)
        if stages is None:
            stages = self.batches[bucket] = {stage: Duration() for stage in STAGES[1:]}
        for stage in STAGES[1:]:
            stages[stage].add(getattr(times, stage))

    def count_success(self, rows: int, arrived: int, times: BatchTimes) -> None:
        """One request answered: it arrived at `arrived` (monotonic ns) and shared the forward of `times`."""
        now = time.monotonic_ns()
        self.inferences += rows
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.success.add(now - arrived)
        self.stages["queue"].add(times.began - arrived)
        for stage in STAGES[1:]:
            self.stages[stage].add(getattr(times, stage))

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
                **{stage: duration.document() for stage, duration in self.stages.items()},
                "cache_hit": Duration().document(),
                "cache_miss": Duration().document(),
            },
            "batch_stats": [
                {"batch_size": bucket, **{stage: duration.document() for stage, duration in stages.items()}}
                for bucket, stages in sorted(self.batches.items())
            ],
        }
