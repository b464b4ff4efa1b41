"""Three streams of one CUDA device, and what a batch of requests asks of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .driver import driver


class Streams(Protocol):
    """Streams and events are integers, memory is an address. On a CPU a test stands in for it."""

    copy_in: int
    compute: int
    copy_out: int

    def event(self) -> int: ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def zero(self, target: int, nbytes: int, stream: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on comes after the event."""

    def passed(self, event: int) -> bool:
        """Whether an event has come."""

    def synchronize(self, event: int) -> None:
        """Wait for an event."""

    def synchronize_all(self) -> None:
        """Wait for all that was queued."""

    def pinned(self, elements: int) -> Tensor:
        """BF16 in host memory that the device copies from and to."""

    def on_device(self, elements: int) -> Tensor:
        """BF16."""


class CudaStreams:
    """`compute` is the current stream of the thread that makes this, and the one that graphs are captured on:
    they replay where their workspaces are known."""

    def __init__(self, device: torch.device, compute: torch.cuda.Stream) -> None:
        self._device = device
        self._kept = [compute, torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self._events: list[torch.cuda.Event] = []
        torch.cuda.set_stream(compute)
        self.compute, self.copy_in, self.copy_out = (stream.cuda_stream for stream in self._kept)
        calls = driver()
        self.copy, self.zero = calls.copy, calls.zero
        self.record, self.wait = calls.record, calls.wait
        self.passed, self.synchronize = calls.passed, calls.synchronize

    def event(self) -> int:
        event = torch.cuda.Event()
        event.record(self._kept[0])  # torch makes it at its first use
        self._events.append(event)
        return int(event.cuda_event)

    def synchronize_all(self) -> None:
        torch.cuda.synchronize(self._device)

    def pinned(self, elements: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(elements, dtype=torch.bfloat16, pin_memory=True)

    def on_device(self, elements: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(elements, dtype=torch.bfloat16, device=self._device)
