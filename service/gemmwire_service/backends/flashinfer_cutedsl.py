"""FlashInfer's kernels in CuTe DSL, compiled at the first call of a shape; for compute capability 10.x."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends import cuda_device
from gemmwire_service.backends import flashinfer_gemm as gemm
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, foreign_weight
from gemmwire_service.backends.block_scaled import BlockScaledWeight, in_order, without_elements
from gemmwire_service.mxfp8.layout import ScaleLayout
from gemmwire_service.mxfp8.weight import MxWeight

_LAYOUTS = (ScaleLayout.R128C4,)


@dataclass(frozen=True, eq=False)
class CutedslWeight(BlockScaledWeight):
    """Rows of codes and scales in their own order."""


class FlashinferCutedsl:
    name: ClassVar[str] = "flashinfer_cutedsl"

    def unavailable(self, device: torch.device) -> str | None:
        return package.unavailable("cute-dsl", device) or package.no_cute_dsl(cuda_device.capability(device))

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> CutedslWeight:
        return in_order(CutedslWeight, weight, device)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return gemm.plans(bucket, _LAYOUTS)

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, CutedslWeight):
            raise foreign_weight(self.name, weight)
        gemm.forward(x, weight, plan, out, backend="cute-dsl", layouts=_LAYOUTS)
