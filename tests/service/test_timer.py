"""The timer of a CPU, with a clock that a test turns."""

from __future__ import annotations

import time

import pytest
import torch

from gemmwire_service.timer import REPLAYS, WARM_UPS, CpuTimer, timer_for


def test_the_median_of_the_runs_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a first call that compiles, or one that was interrupted, in the result."""
    now = 0.0
    durations = iter([60.0] * WARM_UPS + [5e-6] * (REPLAYS - 3) + [1.0] * 3)

    def run() -> None:
        nonlocal now
        now += next(durations)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert CpuTimer().microseconds(run) == pytest.approx(5.0, rel=1e-3)
    assert list(durations) == []


def test_a_cpu_is_timed_by_calls() -> None:
    assert isinstance(timer_for(torch.device("cpu")), CpuTimer)
