"""Rows that came quantized, as the BF16 rows that the backends take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gemmwire_service.mxfp8.format import dequantize, quantize
from gemmwire_service.mxfp8.rows import rows_of, widen
from oracle import spread

GOLDENS = Path(__file__).parents[2] / "goldens" / "mxfp8_quantize_cuda.npz"


def requantized(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    again, scale = quantize(rows_of(codes, scales))
    return again.view(torch.uint8), scale


def test_every_finite_golden_block_comes_back_byte_for_byte() -> None:
    """Guards: an answer that differs from that of the same rows in BF16: of a block whose largest is 224 of
    its scale, of the smallest blocks, of zeros with a sign."""
    with np.load(GOLDENS) as file:
        bits, codes, scales = (
            torch.from_numpy(file[name]) for name in ("input_bf16_bits", "payload_e4m3", "scale_e8m0")
        )
    finite = bits.view(torch.bfloat16).isfinite().all(-1)
    codes, scales = codes[finite].view(torch.uint8), scales[finite][:, None]
    assert len(codes) > 60_000
    assert ((codes & 0x7F).amax(-1) == 0x76).any(), "no block whose largest is 224"
    again, scale = requantized(codes, scales)
    wrong = (again != codes).any(-1) | (scale != scales)[:, 0]
    first = int(wrong.to(torch.uint8).argmax())
    assert not wrong.any(), (
        f"{int(wrong.sum())} blocks differ, first {codes[first].tolist()} of scale {int(scales[first])}: "
        f"{again[first].tolist()} of {int(scale[first])}"
    )


@pytest.mark.parametrize("scale", [20, 119, 127, 200])
def test_codes_that_no_quantizer_made_keep_their_numbers(scale: int) -> None:
    """Guards: a client whose blocks use a part of E4M3's range, answered with other numbers."""
    codes = torch.arange(0x58, dtype=torch.uint8).repeat(2)[: 5 * 32].view(-1, 32)
    codes |= torch.arange(5 * 32, dtype=torch.uint8).view(-1, 32) % 2 << 7
    scales = torch.full((5, 1), scale, dtype=torch.uint8)
    expected = dequantize(codes.view(torch.float8_e4m3fn), scales, torch.float64)
    assert torch.equal(dequantize(*quantize(rows_of(codes, scales)), torch.float64), expected)


@pytest.mark.parametrize("nan", ["scale", "code", "negative-code"])
def test_a_nan_is_one_and_spoils_nothing_beside_it(nan: str) -> None:
    codes = torch.full((3, 64), 0x38, dtype=torch.uint8)
    scales = torch.full((3, 2), 127, dtype=torch.uint8)
    if nan == "scale":
        scales[1, 1] = 255
    else:
        codes[1, 40] = 0x7F if nan == "code" else 0xFF
    rows = rows_of(codes, scales)
    assert rows[1].isnan().any()
    assert torch.equal(rows[[0, 2]], torch.ones(2, 64, dtype=torch.bfloat16))


def test_what_is_above_the_range_of_bfloat16_is_an_infinity() -> None:
    """Guards: 448 * 2^127 wrapped around, or clamped to a number that nobody sent."""
    rows = rows_of(torch.tensor([[0x7E] * 32], dtype=torch.uint8), torch.tensor([[254]], dtype=torch.uint8))
    assert rows.isinf().all()


@pytest.mark.parametrize("k", [1, 33, 341])
def test_a_ragged_k(k: int) -> None:
    """Guards: a scale that is taken from the next row."""
    x = torch.nn.functional.pad(spread(4, k), (0, -k % 32)).bfloat16()
    codes, scales = quantize(x)
    rows = rows_of(codes.view(torch.uint8)[:, :k].contiguous(), scales)
    assert rows.shape == (4, k)
    again, scale = quantize(torch.nn.functional.pad(rows, (0, -k % 32)))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale, scales)


def test_widening_is_torch_s_conversion() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    out = torch.empty(len(codes), dtype=torch.bfloat16)
    widen(codes, out)
    assert torch.equal(
        out.view(torch.int16), codes.view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int16)
    )
