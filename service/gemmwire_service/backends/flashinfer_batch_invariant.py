"""FlashInfer's batch-invariant kernels: a row of y has the same bits whatever the bucket and its place in it.

They are slower than the others, so this backend is never chosen by itself. x is quantized as for the others,
since the bytes of a block depend on nothing but the block.
"""

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
class BatchInvariantWeight(BlockScaledWeight):
    """Rows of codes and scales in their own order."""


class FlashinferBatchInvariant:
    name: ClassVar[str] = "flashinfer_batch_invariant"

    def unavailable(self, device: torch.device) -> str | None:
        return package.no_batch_invariant(device)

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> BatchInvariantWeight:
        return in_order(BatchInvariantWeight, weight, device)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return gemm.plans(bucket, _LAYOUTS)[:1]  # a timing must not choose between buckets

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, BatchInvariantWeight):
            raise foreign_weight(self.name, weight)
        # The mode demands "auto", runs in place of what that would choose, and never falls back to it.
        gemm.forward(x, weight, plan, out, backend="auto", layouts=_LAYOUTS, batch_invariant=True)
