"""How long a forward takes, as it will be run: replayed from a CUDA graph, or called on a CPU."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Protocol

import torch

from .capture import Run, capture, capture_stream

log = logging.getLogger("gemmwire.timer")

REPLAYS = 20
WARM_UPS = 2  # the first call may compile, load a kernel or allocate a workspace; the second shows it did


class Timer(Protocol):
    def microseconds(self, run: Run) -> float:
        """The median time of one `run`, which may be called any number of times."""


def timer_for(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


class CpuTimer:
    def microseconds(self, run: Run) -> float:
        for _ in range(WARM_UPS):
            run()
        return statistics.median(_elapsed(run) for _ in range(REPLAYS))


def _elapsed(run: Run) -> float:
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


class CudaTimer:
    """Replays of a captured graph, each with a cold L2 cache: between two forwards of one layer a server runs
    others, whose weights push this one's out.

    Runs are warmed up and captured on `capture_stream`. Where one cannot be captured, its calls are timed
    instead, and the log says so.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = capture_stream(device)
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * size, 1), dtype=torch.uint8, device=device)

    def microseconds(self, run: Run) -> float:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
            self._stream.synchronize()
            replay = self._capture(run)
            times = self._time(replay)
        current.wait_stream(self._stream)
        return statistics.median(times)

    def _capture(self, run: Run) -> Run:
        try:
            return capture(run, self._stream).replay
        except Exception as error:
            torch.cuda.synchronize(self._device)  # raises where more than the capture is lost
            log.warning("not captured (%s): timed as single calls", error)
            return run

    def _time(self, replay: Run) -> list[float]:
        replay()
        pairs = [self._one(replay) for _ in range(REPLAYS)]
        self._stream.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]

    def _one(self, replay: Run) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueued without waiting: the host is ahead of the flush, so that its own time is not counted."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record(self._stream)
        replay()
        end.record(self._stream)
        return begin, end
