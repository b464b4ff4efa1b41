"""y = x @ W.T for few rows of x, on a CPU that multiplies BF16: few_rows.c.

torch finds out anew at each call how oneDNN is to do it, which takes 10 us, and 20 where something else was
in the processor's caches. For a W of 1024x1024 this takes 20 us in all where that takes 36, of eight rows 40;
3 for a W of 384x384.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gemmwire_service.compiled import FEW_ROWS, NotCompiled, load

from .format import BLOCK

LARGEST = 4 << 20  # bytes of W; a larger one comes from memory, and takes the time of that

Multiply = Callable[[Tensor, Tensor, Tensor], None]


class FewRows(NamedTuple):
    """`multiply(x, w, out)`: BF16 [m, k], [n, k], [m, n], contiguous; m from 1 to `most`, k % 32 == 0."""

    most: int
    multiply: Multiply


def few_rows(folder: Path | None) -> FewRows | None:
    """None where the processor lacks the instruction; `folder` as `load` has it. Errors: NotCompiled."""
    library = load(FEW_ROWS, folder)
    most = ctypes.c_int.in_dll(library.holding, "gemmwire_few_rows").value
    if not most:
        return None
    function = library.holding.gemmwire_multiply_few_rows
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 3
    function.restype = None

    def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
        m, k = x.shape
        n = len(w)
        if not 1 <= m <= most or k % BLOCK or w.shape[1] != k or out.shape != (m, n):
            raise ValueError(f"x is {[m, k]}, W {list(w.shape)} and out {list(out.shape)}")
        function(x.data_ptr(), w.data_ptr(), out.data_ptr(), m, n, k)

    if not _is_exact(multiply, most):
        raise NotCompiled(
            "the compiled matmul gives other bits than torch's on numbers that it adds up exactly"
        )
    return FewRows(most, multiply)


def _is_exact(multiply: Multiply, most: int) -> bool:
    """Whether it agrees with torch where every order of the sum gives the same, at each m and ragged n."""
    generator = torch.Generator().manual_seed(0)
    for m in range(1, most + 1):
        for n, k in ((1, 32), (66, 96), (131, 544)):
            x, w = (torch.randint(-9, 10, (each, k), generator=generator).bfloat16() for each in (m, n))
            out = torch.empty(m, n, dtype=torch.bfloat16)
            multiply(x, w, out)
            if not torch.equal(out, (x.double() @ w.double().T).bfloat16()):
                return False
    return True
