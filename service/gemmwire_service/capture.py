"""Capturing calls as a CUDA graph, in a way that a capture which fails does no harm to those after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

log = logging.getLogger("gemmwire.capture")

Run = Callable[[], None]
PoolHandle = Any  # torch's: a pair of integers

_failed: list[torch.cuda.CUDAGraph] = []


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream on which forwards of the device are captured and replayed: for each stream it has seen,
    FlashInfer keeps a workspace of 40 MiB."""
    return torch.cuda.Stream(device)


def capture(run: Run, stream: torch.cuda.Stream, pool: PoolHandle | None = None) -> torch.cuda.CUDAGraph:
    """The calls of `run` as a graph, its memory from `pool`; they are not run.

    Other threads may allocate and copy meanwhile, as a refit does. Errors: what `run` raises, else what the
    capture does; `pool` cannot be used any more then.
    """
    graph = torch.cuda.CUDAGraph()
    cause: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            try:
                run()
            except Exception as error:
                cause = error
                raise
    except Exception as error:
        _clean_up(graph, stream)
        if cause is None or cause is error:
            raise
        raise cause from error  # the end of a broken capture raises too, and says less
    return graph


def _clean_up(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """torch's allocator goes on recording for a capture that could not be ended, and asks its graph."""
    _failed.append(graph)
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, graph.pool())
