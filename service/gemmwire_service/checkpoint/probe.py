"""Fixed rows to try a layer with, and what the unquantized weight answers to them.

The rows depend on the layer's name and K alone, so two servers of one checkpoint state the same error. They
are otherwise like those of `sample`.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from gemmwire_service.checkpoint.base import Probe
from gemmwire_service.mxfp8.format import BLOCK
from gemmwire_service.sample import EXPONENTS, LARGEST, scaled

ROWS = 4
_CHUNK = 1 << 18  # elements of W that are in FP32 at one time


def probe_rows(name: str, k: int) -> Tensor:
    """BF16 [4, K]."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}:{k}".encode()))
    blocks = -(-k // BLOCK)
    integers = torch.randint(-LARGEST, LARGEST + 1, (ROWS, blocks, BLOCK), generator=generator)
    exponents = torch.randint(*EXPONENTS, (ROWS, blocks, 1), generator=generator)
    return scaled(integers, exponents.int())[:, :k].contiguous()


def make_probe(name: str, weight: Tensor, bias: Tensor | None) -> Probe:
    """The probe of a float weight [N, K] and FP32 bias [N]. Rows of W become FP32 a few at a time."""
    n, k = weight.shape
    x = probe_rows(name, k)
    rows, y = x.float(), torch.empty(ROWS, n)
    step = max(1, _CHUNK // k)
    for start in range(0, n, step):
        y[:, start : start + step] = rows @ weight[start : start + step].float().T
    return Probe(x, y if bias is None else y + bias)
