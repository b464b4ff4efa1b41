"""Our quantizer on CUDA, to the byte: against FlashInfer's own output, and against itself on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemmwire_service.mxfp8.fake import fake_quantize
from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize
from on_gpu import goldens

pytestmark = pytest.mark.gpu


def first_difference(got: Tensor, expected: Tensor) -> str:
    wrong = (got.cpu() != expected.cpu()).nonzero()
    return "" if not len(wrong) else f"{len(wrong)} differ, first {wrong[0].tolist()}"


def assert_same_bytes(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for what, ours, theirs in zip(("codes", "scales"), got, expected, strict=True):
        assert not first_difference(ours.view(torch.uint8), theirs.view(torch.uint8)), what


def test_every_golden_block(device: torch.device) -> None:
    x, codes, scales = goldens()
    assert_same_bytes(quantize(x.to(device)), (codes, scales[:, None]))


def test_the_goldens_in_one_long_row(device: torch.device) -> None:
    """Guards: blocks that are cut at the wrong place where K is large."""
    x, codes, scales = goldens()
    assert_same_bytes(quantize(x.reshape(1, -1).to(device)), (codes.view(1, -1), scales[None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_under_every_kind_of_scale(device: torch.device, dtype: torch.dtype) -> None:
    """Guards: subnormal numbers that a GPU flushes to zero, another rounding of its casts."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    rows = torch.stack([numbers, numbers.flip(0), numbers.roll(7)]).view(-1, BLOCK)
    rows = torch.cat([rows, numbers.view(BLOCK, -1).t().contiguous()])
    assert_same_bytes(quantize(rows.to(device)), quantize(rows))


def test_fp32_bits_of_all_kinds(device: torch.device) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(torch.float32).view(-1, BLOCK)
    x = torch.cat([x, x * 2.0**-100, torch.ldexp(x[:1000].nan_to_num(0, 0, 0), torch.tensor(-140))])
    assert_same_bytes(quantize(x.to(device)), quantize(x))


def test_dequantize_of_every_code_and_scale(device: torch.device) -> None:
    """Guards: E4M3's NaN or a subnormal, and E8M0's ends, cast otherwise on a GPU."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).repeat(256, 1)
    scales = torch.arange(256).to(torch.uint8)[:, None].repeat(1, 256 // BLOCK)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        here, there = (
            dequantize(codes.to(device), scales.to(device), dtype).cpu(),
            dequantize(codes, scales, dtype),
        )
        assert torch.equal(here.nan_to_num(-1.0), there.nan_to_num(-1.0)), dtype


@pytest.mark.parametrize(("m", "k"), [(1, 32), (7, 96), (300, 1536), (129, 8192)], ids=str)
def test_fake_quantize_is_the_round_trip(device: torch.device, m: int, k: int) -> None:
    x = goldens()[0].flatten()
    x = x.repeat(-(-m * k // len(x)))[: m * k].view(m, k).to(device)
    out = torch.empty_like(x)
    fake_quantize(x, out)
    expected = dequantize(*quantize(x)).to(torch.bfloat16)
    expected[~x.isfinite()] = torch.nan
    same = (out == expected) | (out.isnan() & expected.isnan())
    assert same.all(), f"first {(~same).nonzero()[0].tolist()}"
