"""Fixed rows to try a backend with, at any M.

Neighbouring blocks of 32 differ by up to 2^23 in magnitude: a scale read from the wrong place then shows,
where rows of one magnitude would hide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mxfp8.format import BLOCK

_SEED = 20_260_101
_EXPONENTS = (-12, 12)  # of a block, upper end excluded


def sample_rows(m: int, k: int, k_pad: int, device: torch.device) -> Tensor:
    """BF16 [m, k_pad] on `device`, columns k.. zero; the same on every call with the same arguments.

    Each block is integers of at most 7 bits times a power of two, hence exact in BF16.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    blocks = -(-k // BLOCK)
    shape = (m, blocks, BLOCK)
    integers = torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)
    exponents = torch.randint(
        *_EXPONENTS, (m, blocks, 1), dtype=torch.int32, device=device, generator=generator
    )
    power = ((exponents + 127 - 6) << 23).view(torch.float32)  # integers / 64 have magnitude 1
    rows = integers.to(torch.bfloat16) * power.to(torch.bfloat16)
    out = torch.zeros(m, k_pad, dtype=torch.bfloat16, device=device)
    out[:, :k] = rows.view(m, -1)[:, :k]
    return out
