"""Blocks at the edges of MXFP8, for one quantizer to be held against another on all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gemmwire_service.mxfp8.format import BLOCK

GOLDENS = Path(__file__).parent / "goldens" / "mxfp8_quantize_cuda.npz"
PLACE = 7  # of the one element that is not zero


def goldens() -> Tensor:
    """BF16 [70854, 32]: what FlashInfer's kernel was given: every pattern as amax, NaN, Inf, random."""
    with np.load(GOLDENS) as file:
        return torch.from_numpy(file["input_bf16_bits"].view(np.int16)).view(torch.bfloat16)


def bf16_patterns() -> Tensor:
    """BF16 [65536]: every one, by its bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def one_in_a_block(values: Tensor) -> Tensor:
    """[B] -> [B, 32]: zeros, but for one element."""
    blocks = torch.zeros(len(values), BLOCK, dtype=values.dtype)
    blocks[:, PLACE] = values
    return blocks


def fp32_edges() -> Tensor:
    """FP32 [1960]: 448 * 2^e for every e of a scale that is not clamped, and a few ulps above and below."""
    steps = torch.tensor([-4, -2, -1, 0, 1, 2, 4, 8], dtype=torch.float64)
    exponents = torch.arange(-117, 128, dtype=torch.float64)[:, None]
    return (torch.exp2(exponents) * (1.75 + steps * 2.0**-23)).flatten().float()


def exponents(x: Tensor) -> tuple[Tensor, Tensor]:
    """BF16 -> the exponent field and the 7 bits of mantissa of its magnitude, int32."""
    bits = x.view(torch.int16).int() & 0x7FFF
    return bits >> 7, bits & 0x7F


def finite(blocks: Tensor) -> Tensor:
    """bool [B]"""
    return blocks.isfinite().all(-1)


def assert_same_bytes(ours: Tensor, theirs: Tensor, blocks: Tensor) -> None:
    """uint8 [B, ...] of BF16 or FP32 [B, 32], naming the first block that differs."""
    wrong = (ours.flatten(1) != theirs.flatten(1)).any(-1).nonzero().flatten()
    assert len(wrong) == 0, (
        f"{len(wrong)} of {len(ours)} blocks differ, first {int(wrong[0])}, {blocks[wrong[0]].tolist()}: "
        f"{ours[wrong[0]].tolist()}, theirs {theirs[wrong[0]].tolist()}"
    )


def assert_exactly(found: Tensor, expected: Tensor, blocks: Tensor) -> None:
    """bool [B]: the blocks that differ are those that are said to."""
    wrong = (found != expected).nonzero().flatten()
    assert len(wrong) == 0, (
        f"{len(wrong)} blocks differ where they should not, or not where they should, first "
        f"{blocks[wrong[0]].tolist()}: differs {bool(found[wrong[0]])}"
    )
