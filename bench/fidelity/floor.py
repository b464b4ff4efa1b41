"""MXFP8 by the scale rule of the OCP specification, which rounds down: for comparison, nothing serves it.

    s = floor(log2(amax)) - 8 + 127, at least 0,

8 being the exponent of the largest E4M3 number, 448 (OCP Microscaling Formats 1.0, section 6.3). A block
whose largest magnitude lies above 1.75 * 2^e then reaches beyond 448 under its scale, and saturates there.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
_E4M3_MAX = 448.0
_E4M3_EXPONENT = 8


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finite x, BF16, FP16 or FP32 [..., K] -> float8_e4m3fn [..., K] and uint8 [..., K/32]."""
    blocks = x.detach().double().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    exponent = torch.frexp(amax).exponent - 1  # frexp's fraction is at least a half
    scales = torch.where(amax > 0, exponent - _E4M3_EXPONENT + 127, 0).clamp_(min=0)
    # Exact in float64, in which no BF16 or FP32 is subnormal, and rounded once by the cast.
    scaled = torch.ldexp(blocks, 127 - scales[..., None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return scaled.flatten(-2).float().to(torch.float8_e4m3fn), scales.to(torch.uint8)
