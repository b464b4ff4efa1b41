"""cuBLAS by way of torch's block-scaled `scaled_mm`: MXFP8 from compute capability 10.0 on, no FlashInfer.

x is quantized by torch operations, in several passes, which a fused kernel would do in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmwire_service.backends import cuda_device
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, check_shapes, foreign_weight
from gemmwire_service.backends.block_scaled import (
    BlockScaledWeight,
    check_layout,
    finish,
    in_order,
    non_finite_rows,
    without_elements,
)
from gemmwire_service.backends.cuda_device import dotted
from gemmwire_service.mxfp8.format import quantize
from gemmwire_service.mxfp8.layout import ScaleLayout, swizzle
from gemmwire_service.mxfp8.weight import MxWeight

MULTIPLIES_FROM = (10, 0)  # where torch's own tests of it begin
SYMBOLS = ("ScalingType", "SwizzleType", "scaled_mm")

_LAYOUTS = (ScaleLayout.R128C4,)
_QUANTIZER = "torch"


@dataclass(frozen=True, eq=False)
class CublasWeight(BlockScaledWeight):
    """Rows of codes and scales in their own order."""


class Cublas:
    name: ClassVar[str] = "cublas"

    def unavailable(self, device: torch.device) -> str | None:
        on = cuda_device.capability(device)
        if on is None:
            return cuda_device.missing(device, MULTIPLIES_FROM)
        if on < MULTIPLIES_FROM:
            return f"compute capability {dotted(on)}: cuBLAS has MXFP8 from {dotted(MULTIPLIES_FROM)} on"
        lacks = [symbol for symbol in SYMBOLS if not hasattr(F, symbol)]
        if lacks:
            return f"torch {torch.__version__} lacks {', '.join(lacks)}: a newer one has them, as does 2.13"
        return None

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> CublasWeight:
        return in_order(CublasWeight, weight, device)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return (Plan(bucket, ScaleLayout.R128C4.value, _QUANTIZER),)

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, CublasWeight):
            raise foreign_weight(self.name, weight)
        check_layout(self.name, plan, _LAYOUTS)
        check_shapes(x, weight, plan, out)
        codes, scales = quantize(x)
        out.copy_(_multiply(codes, swizzle(scales, ScaleLayout.R128C4), weight))
        finish(out, weight.bias, non_finite_rows(x))


def _multiply(codes: Tensor, scales: Tensor, weight: CublasWeight) -> Tensor:
    """BF16 [m, n_pad]. The bias stays out: `scaled_mm` takes none in FP32."""
    return F.scaled_mm(
        mat_a=codes,
        mat_b=weight.codes.t(),
        scale_a=scales.view(torch.float8_e8m0fnu),
        scale_recipe_a=F.ScalingType.BlockWise1x32,
        scale_b=weight.scales.view(torch.float8_e8m0fnu),
        scale_recipe_b=F.ScalingType.BlockWise1x32,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16,
    )
