"""What the tests of tests/gpu share: a backend or the reason there is none, goldens, a captured graph.

With REHEARSE_SM100 set, the CPU stands for an SM100 GPU with simulators of FlashInfer and cuBLAS, and a graph
is replayed by running again. That tells nothing of the kernels, but whether their tests would run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import Backend

REHEARSAL = bool(os.environ.get("REHEARSE_SM100"))
GOLDENS = Path(__file__).parent / "goldens" / "mxfp8_quantize_cuda.npz"


def sized(number: int, rehearsed: int) -> int:
    """A size or count of a test; the simulators are slow."""
    return rehearsed if REHEARSAL else number


class Graph(Protocol):
    def replay(self) -> None: ...


class Rerun:
    """Stands for a graph where there are none."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def available(name: str, device: torch.device) -> Backend:
    """The backend, unless it does not run here: then the test is skipped with its reason."""
    backend = BACKENDS[name]()
    reason = backend.unavailable(device)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return backend


def goldens() -> tuple[Tensor, Tensor, Tensor]:
    """x BF16 [b, 32], codes uint8 [b, 32], scales uint8 [b], as FlashInfer's CUDA function made them."""
    with np.load(GOLDENS) as file:
        bits = torch.from_numpy(file["input_bf16_bits"].view(np.int16))
        codes, scales = torch.from_numpy(file["payload_e4m3"]), torch.from_numpy(file["scale_e8m0"])
    return bits.view(torch.bfloat16), codes, scales


def capture(run: Callable[[], None], stream: torch.cuda.Stream | None) -> Graph:
    """`run` as a graph of the stream, after two eager calls on it; without a stream it is run again."""
    if stream is None:
        return Rerun(run)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):  # whatever is allocated or loaded at the first call
            run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    torch.cuda.synchronize()
    return graph


class busy:  # noqa: N801 - used as a statement
    """Repeats `work` on another thread for as long as the block runs; what it raises is raised at the end."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._stop = threading.Event()
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._work()
            except Exception as error:
                self._errors.append(error)
                return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        assert not self._errors, self._errors[0]
