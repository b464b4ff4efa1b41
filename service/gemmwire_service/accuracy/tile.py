"""Some rows of a weight beside what MXFP8 makes of them, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmwire_service.mxfp8.format import dequantize
from gemmwire_service.mxfp8.weight import MxWeight

_ELEMENTS = 1 << 18  # of a tile: what is computed of them takes some 2 MB each time


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows start..start+r. exact: float64 [r, k]; served: float64 [r, k], what the codes stand for;
    codes: float8_e4m3fn [r, k_pad]; scales: uint8 [r, k_pad/32]."""

    start: int
    exact: Tensor
    served: Tensor
    codes: Tensor
    scales: Tensor


def tiles(weight: Tensor, mx: MxWeight) -> Iterator[Tile]:
    """weight: BF16, F16 or F32 [n, k]; `mx` is it in MXFP8. All rows, in order."""
    step = max(1, _ELEMENTS // mx.k)
    for start in range(0, mx.n, step):
        rows = slice(start, start + step)
        codes, scales = mx.codes[rows], mx.scales[rows]
        served = dequantize(codes, scales, torch.float64)[:, : mx.k]
        yield Tile(start, weight[rows].double(), served, codes, scales)
