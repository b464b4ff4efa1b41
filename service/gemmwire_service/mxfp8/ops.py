"""`torch.ops.gemmwire.mxfp8_quantize`: quantization as one opaque operator, for models that are compiled.

The fake takes its sizes from the function that the real operator takes them from, so that a compiler cannot
plan with others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemmwire_service.mxfp8.format import BLOCK, FLOATS, quantize
from gemmwire_service.mxfp8.layout import ScaleLayout, scale_size, swizzle


@torch.library.custom_op("gemmwire::mxfp8_quantize", mutates_args=())
def mxfp8_quantize(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """x: BF16, FP16 or FP32 [m, K], K a multiple of 32; layout: "linear", "8x4" or "128x4".

    Returns float8_e4m3fn [m, K] and the scales in that layout, uint8 [scale_size(layout, m, K/32)].
    Raises TypeError for another dtype, ValueError for another shape or layout.
    """
    order = _checked(x, layout)
    codes, scales = quantize(x)
    return codes, swizzle(scales, order)


@mxfp8_quantize.register_fake
def _(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    order = _checked(x, layout)
    m, k = x.shape
    codes = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    return codes, torch.empty(scale_size(order, m, k // BLOCK), dtype=torch.uint8, device=x.device)


def _checked(x: Tensor, layout: str) -> ScaleLayout:
    if x.dtype not in FLOATS:
        raise TypeError(
            f"x is {x.dtype}: mxfp8_quantize takes bfloat16, float16 or float32; convert it first"
        )
    if x.ndim != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"x is {list(x.shape)}: mxfp8_quantize takes [m, K] with K a multiple of {BLOCK}; flatten the "
            "leading dimensions and pad K with zeros"
        )
    try:
        return ScaleLayout(layout)
    except ValueError:
        names = ", ".join(repr(each.value) for each in ScaleLayout)
        raise ValueError(f"layout is {layout!r}: it has to be one of {names}") from None
