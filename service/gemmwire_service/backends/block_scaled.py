"""What the MXFP8 kernels share: the padded weight they read, the bias they lack, the rows they cannot carry.

A kernel multiplies E4M3 codes under E8M0 scales and writes BF16. Three things are left to its backend: N and
K padded to what the kernel divides by, the bias, and the rows of x with a NaN or Inf, which its quantizer
turns into finite numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight
from gemmwire_service.mxfp8.format import BLOCK
from gemmwire_service.mxfp8.layout import ScaleLayout, round_up, swizzle
from gemmwire_service.mxfp8.weight import MxWeight

TILE = 128  # rows of N, and columns of K, under one tile of 128x4 scales

_INF = float("inf")


@dataclass(frozen=True, eq=False)
class BlockScaledWeight(PreparedWeight):
    """codes: float8_e4m3fn [n_pad, k_pad]; scales: uint8 [n_pad * k_pad/32], 128x4; bias: FP32 [n_pad].

    Both are in the order that `layout` names. What pads them is zero.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None


Weight = TypeVar("Weight", bound=BlockScaledWeight)


@dataclass(frozen=True, eq=False)
class Padded:
    """A weight in its own order and in memory of its own: codes uint8 [n_pad, k_pad], scales uint8 [n_pad,
    k_pad/32], linear, bias FP32 [n_pad] or None."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def e4m3(self) -> Tensor:
        return self.codes.view(torch.float8_e4m3fn)


def pad(weight: MxWeight, n_multiple: int, k_multiple: int, device: torch.device) -> Padded:
    """The weight with rows and blocks of zeros up to the multiples, on `device`; exact in every result."""
    n, blocks = weight.n, weight.k_pad // BLOCK
    n_pad, k_pad = round_up(n, n_multiple), round_up(weight.k_pad, k_multiple)
    codes = torch.zeros(n_pad, k_pad, dtype=torch.uint8, device=device)
    codes[:n, : weight.k_pad] = weight.codes.view(torch.uint8).to(device)
    scales = torch.zeros(n_pad, k_pad // BLOCK, dtype=torch.uint8, device=device)
    scales[:n, :blocks] = weight.scales[:n, :blocks].to(device)
    if weight.bias is None:
        return Padded(codes, scales, None)
    bias = torch.zeros(n_pad, dtype=torch.float32, device=device)
    bias[:n] = weight.bias.to(device)
    return Padded(codes, scales, bias)


def in_order(form: type[Weight], weight: MxWeight, device: torch.device) -> Weight:
    """The form whose rows keep their order, padded to whole tiles of scales."""
    padded = pad(weight, TILE, TILE, device)
    n_pad, k_pad = padded.codes.shape
    scales = swizzle(padded.scales, ScaleLayout.R128C4)
    return form("128x4", weight.n, weight.k, n_pad, k_pad, padded.e4m3, scales, padded.bias)


def without_elements(spec: LayerSpec) -> str | None:
    """Why a layer cannot be padded into one that a kernel takes; every other can."""
    return None if spec.n > 0 and spec.k > 0 else f"N={spec.n}, K={spec.k}: both have to be at least 1"


def check_layout(name: str, plan: Plan, layouts: tuple[ScaleLayout, ...]) -> None:
    """Raises ValueError for scales of x that a kernel does not read; some would take them for its own."""
    if plan.layout and plan.layout not in layouts:
        raise ValueError(f"{name} reads the scales of x in {', '.join(layouts)}, not in {plan.layout}")


def non_finite_rows(x: Tensor) -> Tensor:
    """bool [m, 1] of BF16 x [m, K]: the rows with a NaN or Inf. One pass over x, no sync."""
    largest: Tensor = torch.linalg.vector_norm(x, _INF, dim=-1, keepdim=True)  # NaN if any element is
    return (largest < _INF).logical_not_()


def finish(out: Tensor, bias: Tensor | None, non_finite: Tensor) -> None:
    """In place: the FP32 bias is added in FP32 and the sum rounded to BF16; then NaN in the rows named."""
    if bias is not None:
        out.add_(bias)
    out.masked_fill_(non_finite, float("nan"))
