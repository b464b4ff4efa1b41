"""FlashInfer's CUTLASS kernels, which also run on compute capability 11.0 and 12.x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends import flashinfer_gemm as gemm
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, foreign_weight
from gemmwire_service.backends.block_scaled import BlockScaledWeight, in_order, without_elements
from gemmwire_service.mxfp8.layout import ScaleLayout
from gemmwire_service.mxfp8.weight import MxWeight

_LAYOUTS = (ScaleLayout.R128C4,)


@dataclass(frozen=True, eq=False)
class CutlassWeight(BlockScaledWeight):
    """Rows of codes and scales in their own order."""


class FlashinferCutlass:
    name: ClassVar[str] = "flashinfer_cutlass"

    def unavailable(self, device: torch.device) -> str | None:
        return package.unavailable("cutlass", device)

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> CutlassWeight:
        return in_order(CutlassWeight, weight, device)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return gemm.plans(bucket, _LAYOUTS)

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, CutlassWeight):
            raise foreign_weight(self.name, weight)
        gemm.forward(x, weight, plan, out, backend="cutlass", layouts=_LAYOUTS)
