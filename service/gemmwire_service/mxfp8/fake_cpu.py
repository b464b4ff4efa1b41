"""Fake quantization on a CPU in one pass: fake_cpu.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from gemmwire_service.compiled import FAKE_CPU, load

from .format import BLOCK

# Elements up to which giving Python's lock away meanwhile would take longer than the work.
_HOLDING_UP_TO = 1 << 18
_SHARED_FROM = 1 << 20  # elements: a third of a millisecond, of which waking a thread takes a tenth

Quantize = Callable[[Tensor, Tensor], None]


def fake_cpu(folder: Path | None) -> Quantize:
    """fake_quantize(x, out) of fake.py, for tensors on a CPU; `folder` is that of `load`.

    Errors: NotCompiled.
    """
    library = load(FAKE_CPU, folder)
    freeing, holding = (each.gemmwire_fake_quantize for each in (library.freeing, library.holding))
    for function in (freeing, holding):
        function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 4
        function.restype = None
    pool = _Pool()

    def quantize(x: Tensor, out: Tensor) -> None:
        m, k = x.shape
        if k % BLOCK or out.shape != x.shape:  # it would read, or write, beyond their ends
            raise ValueError(
                f"x is {[m, k]} and out {list(out.shape)}: K has to be a multiple of {BLOCK} in both"
            )
        if m * k < _SHARED_FROM:
            function = holding if m * k <= _HOLDING_UP_TO else freeing
            function(x.data_ptr(), out.data_ptr(), m, k, x.stride(0), out.stride(0))
        else:
            pool.run(freeing, x, out)

    return quantize


class _Pool:
    """Rows shared among as many threads as torch has for a matmul, the calling one among them."""

    def __init__(self) -> None:
        self._others: ThreadPoolExecutor | None = None

    def run(self, function: Callable[..., None], x: Tensor, out: Tensor) -> None:
        parts = list(zip(*(each.chunk(torch.get_num_threads()) for each in (x, out)), strict=True))
        if self._others is None and len(parts) > 1:
            self._others = ThreadPoolExecutor(thread_name_prefix="gemmwire-quantize")
        first, *others = [
            (a.data_ptr(), b.data_ptr(), len(a), x.shape[1], x.stride(0), out.stride(0)) for a, b in parts
        ]
        under_way = [self._others.submit(function, *part) for part in others] if self._others else []
        function(*first)
        for each in under_way:
            each.result()
