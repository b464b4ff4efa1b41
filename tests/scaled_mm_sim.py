"""A stand-in for torch's `scaled_mm` over 1x32 blocks, which no CPU has, with the checks of its CUDA code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import physical


def scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor | list[Tensor],
    scale_recipe_a: Any,
    scale_b: Tensor | list[Tensor],
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: list[int] | tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    (m, k), n = mat_a.shape, mat_b.shape[1]
    if {scale_recipe_a, scale_recipe_b} != {F.ScalingType.BlockWise1x32}:
        raise NotImplementedError("only blocks of 1x32 are simulated")
    if bias is not None or contraction_dim or output_dtype != torch.bfloat16:
        raise NotImplementedError("neither a bias, contraction_dim nor another dtype than BF16 is simulated")
    if {swizzle_a, swizzle_b} != {F.SwizzleType.SWIZZLE_32_4_4}:
        raise ValueError("scale_a must be swizzled to SWIZZLE_32_4_4 format")
    if mat_b.shape[0] != k or k % 16 or n % 16:
        raise ValueError(f"mat2 shape ({mat_b.shape[0]}x{n}) must be divisible by 16 and fit {m}x{k}")
    if not mat_a.is_contiguous() or not mat_b.t().is_contiguous():
        raise ValueError("mat_a must be row-major and mat_b column-major")
    a = physical.numbers(_bytes(mat_a), _scales("scale_a", scale_a, m, k))
    w = physical.numbers(_bytes(mat_b.t()), _scales("scale_b", scale_b, n, k))
    with np.errstate(over="ignore"):
        return torch.from_numpy((a @ w.T).astype(np.float32)).to(torch.bfloat16)


def _scales(name: str, scales: Tensor | list[Tensor], rows: int, k: int) -> physical.Bytes:
    if not isinstance(scales, Tensor) or scales.dtype != torch.float8_e8m0fnu or not scales.is_contiguous():
        raise ValueError(f"{name} must be one contiguous float8_e8m0fnu tensor")
    size = physical.length(rows, k // 32, 128)
    if scales.numel() != size:
        raise ValueError(f"For Blockwise scaling {name} should have {size} elements, got {scales.numel()}")
    return physical.scales_at(_bytes(scales).reshape(-1), physical.tiled_128x4(rows, k // 32))


def _bytes(tensor: Tensor) -> physical.Bytes:
    array: physical.Bytes = tensor.view(torch.uint8).numpy()
    return array
