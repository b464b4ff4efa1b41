"""What a layer should answer: float64 over the dequantized operands, compared to the bit or row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize
from gemmwire_service.mxfp8.weight import MxWeight

TOLERANCE = 2.0**-8


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [m, K] of any float dtype, unquantized weight [N, K] -> float64 [m, N] of the quantized operands."""
    prepared = MxWeight.from_float(weight, bias)
    rows = torch.nn.functional.pad(x.to(torch.bfloat16), (0, -x.shape[-1] % 32))
    y = dequantize(*quantize(rows)).double() @ dequantize(prepared.codes, prepared.scales).double().T
    return y if bias is None else y + bias.double()


def spread(m: int, k: int, seed: int = 0) -> Tensor:
    """FP32 [m, k], exact in BF16, whose blocks of 32 differ in exponent by up to 2^23.

    A scale read from the wrong place then shows; rows of one magnitude would hide it.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-k // 32)
    values = torch.randint(-127, 128, (m, blocks, 32), generator=generator).float()
    exponents = torch.randint(-12, 12, (m, blocks, 1), generator=generator)
    return torch.ldexp(values, exponents - 6).view(m, blocks * 32)[:, :k].contiguous()


def sparse(rows: int, k: int, generator: torch.Generator) -> Tensor:
    """FP32 [rows, k], three quarters zero, exact in E4M3: integers up to 15 times 1, 4 or 16 by block, / 16.

    Sums of a few hundred products are exact in FP32 in any order, and most need more bits than BF16 has.
    """
    blocks = -(-k // BLOCK)
    integers = torch.randint(-15, 16, (rows, blocks, BLOCK), generator=generator)
    kept = torch.rand(rows, blocks, BLOCK, generator=generator) < 0.25
    exponents = 2 * torch.randint(0, 3, (rows, blocks, 1), generator=generator)
    return torch.ldexp((integers * kept).float(), exponents - 4).reshape(rows, -1)[:, :k].contiguous()


def rounded_once(exact: Tensor) -> Tensor:
    """float64 that FP32 holds exactly -> BF16."""
    assert torch.equal(exact.float().double(), exact), "the data has to be exact in FP32"
    return exact.to(torch.float32).to(torch.bfloat16)


def assert_same_bits(y: Tensor, expected: Tensor) -> None:
    """Bitwise but for the sign of zero, naming the first difference."""
    wrong = (y != expected).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} of {y.numel()} differ, first {wrong[0].tolist()}: "
        f"{y[tuple(wrong[0])].item()!r}, not {expected[tuple(wrong[0])].item()!r}"
    )


def assert_rows_close(y: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """The largest error of each row, relative to the largest element of the row."""
    assert y.shape == expected.shape, f"shape {tuple(y.shape)}, expected {tuple(expected.shape)}"
    error = (y.double() - expected).abs().amax(-1)
    size = expected.abs().amax(-1)
    worst = (error / size.clamp_min(1e-300)).nan_to_num(float("inf"))
    row = int(worst.argmax())
    assert worst[row] <= tolerance, f"row {row} is off by {worst[row]:.3g} of its largest element"
