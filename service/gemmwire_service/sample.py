"""Fixed rows to try a backend with, at any M, and what such rows are made of.

Neighbouring blocks of 32 differ by up to 2^23 in magnitude: a scale read from the wrong place then shows,
where rows of one magnitude would hide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mxfp8.format import BLOCK

EXPONENTS = (-12, 12)  # of a block, upper end excluded
LARGEST = 127
UNWRITTEN = 7.0  # for y before a forward: neither a likely result nor NaN
_SEED = 20_260_101


def sample_rows(m: int, k: int, k_pad: int, device: torch.device) -> Tensor:
    """BF16 [m, k_pad] on `device`, columns k.. zero; the same on every call with the same arguments."""
    generator = torch.Generator(device).manual_seed(_SEED)
    blocks = -(-k // BLOCK)
    shape = (m, blocks, BLOCK)
    integers = torch.randint(
        -LARGEST, LARGEST + 1, shape, dtype=torch.int8, device=device, generator=generator
    )
    exponents = torch.randint(
        *EXPONENTS, (m, blocks, 1), dtype=torch.int32, device=device, generator=generator
    )
    out = torch.zeros(m, k_pad, dtype=torch.bfloat16, device=device)
    out[:, :k] = scaled(integers, exponents)[:, :k]
    return out


def scaled(integers: Tensor, exponents: Tensor) -> Tensor:
    """Integers [m, K/32, 32] of at most 7 bits, and a power of two for each block, int32 [m, K/32, 1]
    -> BF16 [m, K], exact."""
    power = ((exponents + 127 - 6) << 23).view(torch.float32)  # integers / 64 have magnitude 1
    rows = integers.to(torch.bfloat16) * power.to(torch.bfloat16)
    return rows.view(len(rows), -1)
