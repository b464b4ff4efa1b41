"""Emulation that keeps E4M3 in memory, for a host that is short of it: 1.06 bytes an element, not 2.

Each forward dequantizes the whole weight into a scratch, which all layers share, and then is emulation's, to
the bit. It is never chosen by itself: it costs a pass over the weight, at every M.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, check_shapes, foreign_weight
from gemmwire_service.backends.block_scaled import without_elements
from gemmwire_service.backends.emulation import (
    BIAS_COLUMNS,
    Operands,
    bias_columns,
    dequantized,
    keep_sums_in_fp32,
    multiply_few,
    unavailable,
)
from gemmwire_service.mxfp8.format import BLOCK, power
from gemmwire_service.mxfp8.rows import widen
from gemmwire_service.mxfp8.weight import MxWeight


@dataclass(frozen=True, eq=False)
class E4m3Weight(PreparedWeight):
    """codes: float8_e4m3fn [n, k_pad]; powers: BF16 [n, k_pad/32, 1], what the scale bytes stand for, exact;
    bias: BF16 [n, 32], the columns that emulation has for it."""

    codes: Tensor
    powers: Tensor
    bias: Tensor | None

    @property
    def columns(self) -> int:
        return self.k_pad if self.bias is None else self.k_pad + BIAS_COLUMNS


class EmulationE4m3:
    name: ClassVar[str] = "emulation_e4m3"

    def __init__(self) -> None:
        self._operands = Operands()
        self._matrices = _Matrices()

    def unavailable(self, device: torch.device) -> str | None:
        return unavailable(device)

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> E4m3Weight:
        """Raises BackendError as emulation does, if a dequantized value is above BF16's largest."""
        keep_sums_in_fp32(device)
        for _ in dequantized(weight, device):
            pass  # refuses what BF16 does not hold
        codes = weight.codes.to(device, copy=True)
        powers = power(weight.scales).to(device, torch.bfloat16)[..., None].contiguous()
        bias = None if weight.bias is None else bias_columns(weight.bias.to(device))
        return E4m3Weight("e4m3", weight.n, weight.k, weight.n, weight.k_pad, codes, powers, bias)

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return (Plan(bucket),)

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, E4m3Weight):
            raise foreign_weight(self.name, weight)
        check_shapes(x, weight, plan, out)
        operand = self._operands.rounded(x, weight.k_pad, weight.columns)
        matrix = self._matrices.empty(weight.n, weight.columns, x.device)
        _fill(matrix, weight)
        if multiply_few(operand, matrix, out) is None:
            torch.mm(operand, matrix.t(), out=out)


class _Matrices:
    """The scratch: one a thread on a CPU, grown to the largest layer.

    On a GPU it is torch's to give: a graph that is captured gets it from the graphs' own pool, where the next
    graph gets the same memory, while a buffer that grows would leave the earlier graphs the old address.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    def empty(self, n: int, columns: int, device: torch.device) -> Tensor:
        """BF16 [n, columns], good until the next call."""
        size = n * columns
        if device.type != "cpu":
            return torch.empty(n, columns, dtype=torch.bfloat16, device=device)
        kept: Tensor | None = self._threads.__dict__.get("kept")
        if kept is None or len(kept) < size:
            with torch.inference_mode(False):  # or it could not be written outside inference mode
                kept = torch.empty(size, dtype=torch.bfloat16)
            self._threads.kept = kept
        return kept[:size].view(n, columns)


def _fill(matrix: Tensor, weight: E4m3Weight) -> None:
    """BF16 [n, columns]: each product is exact in FP32 and rounded once, as in `dequantize`."""
    columns = matrix[:, : weight.k_pad]
    _widen(weight.codes, columns)
    columns.unflatten(1, (-1, BLOCK)).mul_(weight.powers)
    if weight.bias is not None:
        matrix[:, weight.k_pad :] = weight.bias


def _widen(codes: Tensor, out: Tensor) -> None:
    """E4M3 -> BF16, exact; a weight has no NaN."""
    if out.device.type == "cpu":
        widen(codes, out)
    else:
        out.copy_(codes)
