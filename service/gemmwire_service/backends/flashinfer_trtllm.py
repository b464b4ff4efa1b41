"""FlashInfer's TensorRT-LLM kernel, the fastest on compute capability 10.x.

It reads a weight whose rows are shuffled, so that its epilogue stores contiguous vectors, and writes its
output in the original order. x can have its scales in either tiled layout over the same weight; which one is
faster depends on N, K and the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends import flashinfer_gemm as gemm
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, foreign_weight
from gemmwire_service.backends.block_scaled import TILE, BlockScaledWeight, pad, without_elements
from gemmwire_service.mxfp8.layout import ScaleLayout, shuffle_rows, shuffle_scales
from gemmwire_service.mxfp8.weight import MxWeight

K_MULTIPLE = 256

_8X4_FIRST = (ScaleLayout.R8C4, ScaleLayout.R128C4)
_8X4_UP_TO = 128  # rows: a guess, from vLLM's timings on GB200 for N of 2304 and 2560, K of 8192


@dataclass(frozen=True, eq=False)
class TrtllmWeight(BlockScaledWeight):
    """Rows of codes and scales shuffled; the bias in its own order, as the output is."""


class FlashinferTrtllm:
    name: ClassVar[str] = "flashinfer_trtllm"

    def unavailable(self, device: torch.device) -> str | None:
        return package.unavailable("trtllm", device) or package.no_cubins()

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> TrtllmWeight:
        """Padded first: the shuffle spreads the last rows of N over the padding.

        N to 128, for the shuffle of the scales, and because mm_mxfp8 computes the length of the weight's
        scales by the layout of x's: both layouts give the same one only where N is whole tiles.
        """
        padded = pad(weight, TILE, K_MULTIPLE, device)
        n_pad, k_pad = padded.codes.shape
        scales = shuffle_scales(padded.scales)  # first: the codes take a layer's room beside the result
        codes = shuffle_rows(padded.e4m3)
        return TrtllmWeight("shuffled_128x4", weight.n, weight.k, n_pad, k_pad, codes, scales, padded.bias)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return gemm.plans(bucket, _layouts(bucket))

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, TrtllmWeight):
            raise foreign_weight(self.name, weight)
        gemm.forward(x, weight, plan, out, backend="trtllm", layouts=_layouts(plan.bucket))


def _layouts(bucket: int) -> gemm.Layouts:
    return _8X4_FIRST if bucket <= _8X4_UP_TO else _8X4_FIRST[::-1]
