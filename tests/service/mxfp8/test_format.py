"""Quantization to the byte: FlashInfer's own output, named blocks with derivations, exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemmwire_service.mxfp8.fake import Workspace, fake_quantize, round_by_operators
from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize

GOLDENS = Path(__file__).parents[2] / "goldens" / "mxfp8_quantize_cuda.npz"
Rounding = Callable[..., None]
INF, NAN = float("inf"), float("nan")
ULP = 2.0**-23  # of FP32 at 1
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Block:
    """The first elements of a block (the others are 0, code 0x00), and what they become."""

    name: str
    x: tuple[float, ...]
    codes: tuple[int, ...]
    scale: int


# A code is sign, 4 bits of exponent (bias 7), 3 of mantissa: 0x7E is 1.75 * 2^8 = 448, 0x78 is 2^8 = 256,
# 0x38 is 1.0, 0x08 is 2^-6 (the smallest normal), 0x01 is 2^-9 (the smallest subnormal), 0x7F is NaN.
# Scale byte s stands for 2^(s-127); s - 127 = ceil(log2(amax / 448)) is called e below.
BLOCKS = [
    Block("zero", (0.0, -0.0), (0x00, 0x80), 0),  # amax 0: the smallest scale; signs stay
    Block("448", (448.0,), (0x7E,), 127),  # e = ceil(log2(1)) = 0, the largest code
    Block("480", (480.0,), (0x77,), 128),  # 480/448 > 1: e = 1; 240 = 1.875 * 2^7, exponent 14, mantissa 7
    Block("minus_480", (-480.0,), (0xF7,), 128),  # amax is of the magnitude
    Block("450_just_above_448", (450.0,), (0x76,), 128),  # 225, between 224 = 1.75 * 2^7 and 240
    Block("224_bottom_of_a_scale", (224.0,), (0x7E,), 126),  # 224/448 = 2^-1 exactly
    Block("225_just_above_224", (225.0,), (0x76,), 127),  # e = 0 again; 225 rounds to 224
    Block("one", (1.0,), (0x78,), 119),  # log2(1/448) = -8.8, e = -8; 1 * 2^8 = 256
    Block("three_and_a_half", (3.5,), (0x7E,), 120),  # 3.5 = 448 * 2^-7
    # One FP32 ulp more is above that: e = -6, (3.5 + ulp) * 2^6 rounds to 224. Through BF16 it would be 3.5.
    Block("three_and_a_half_plus_ulp", (3.5 + 2 * ULP,), (0x76,), 121),
    Block("three_and_a_half_minus_ulp", (3.5 - 2 * ULP,), (0x7E,), 120),  # 448 less a little rounds to 448
    Block(
        "bf16_max", ((2 - 2**-7) * 2.0**127,), (0x78,), 247
    ),  # 1.99 * 2^127 / 448 < 2^120; 255 rounds to 256
    Block("fp16_max", (65504.0,), (0x78,), 135),  # 65504/448 = 146.2: e = 8; 255.9 rounds to 256
    Block("fp32_max", ((2 - ULP) * 2.0**127,), (0x78,), 247),
    Block("bf16_smallest_normal", (2.0**-126,), (0x00,), 0),  # far below 448 * 2^-127
    Block("bf16_smallest_subnormal", (2.0**-133, -(2.0**-133)), (0x00, 0x80), 0),
    Block("fp16_smallest_subnormal", (2.0**-24,), (0x78,), 95),  # log2 = -24 - 8.8, e = -32; 2^8
    # Byte 0 stands for 2^-127, and the kernel writes zeros under it, also for its own largest amax.
    Block("top_of_byte_0", (448 * 2.0**-127, -(448 * 2.0**-127)), (0x00, 0x80), 0),
    Block("above_byte_0", (450 * 2.0**-127,), (0x76,), 1),  # 225 again
    Block("top_of_byte_1", (448 * 2.0**-126,), (0x7E,), 1),
    # amax * fp32(1/448) is subnormal here and rounds to 2^-127 exactly, so the ulp above it is lost.
    Block("fp32_ulp_above_byte_0", ((1.75 + ULP) * 2.0**-119,), (0x00,), 0),
    Block("smallest_normal_code", (448.0, 2.0**-6, -(2.0**-6)), (0x7E, 0x08, 0x88), 127),
    Block("subnormal_codes", (448.0, 2.0**-9, 3 * 2.0**-9, -7 * 2.0**-9), (0x7E, 0x01, 0x03, 0x87), 127),
    # 7.5 units of 2^-9 lie between code 7, the largest subnormal, and 8, the smallest normal: the even one.
    Block("subnormal_to_normal", (448.0, 7.5 * 2.0**-9), (0x7E, 0x08), 127),
    # Half a unit of 2^-9 goes to even: 0.5 to 0, 1.5 to 2, 2.5 to 2. A bit above half goes up.
    Block(
        "subnormal_ties",
        (448.0, 0.5 * 2.0**-9, 1.5 * 2.0**-9, 2.5 * 2.0**-9, (0.5 + 2.0**-8) * 2.0**-9),
        (0x7E, 0x00, 0x02, 0x02, 0x01),
        127,
    ),
    Block("underflow_keeps_its_sign", (448.0, -(2.0**-11), 2.0**-11), (0x7E, 0x80, 0x00), 127),
    # 16, 18, 20 .. 30, 32 are 0x58, 0x59, 0x5A .. 0x5F, 0x60. Ties: 17 to 16, 19 and 21 to 20, 31 to 32.
    Block("ties_to_even", (448.0, 17.0, 19.0, -21.0, 31.0), (0x7E, 0x58, 0x5A, 0xDA, 0x60), 127),
    # 416 = 1.625 * 2^8 is 0x7D and 448 is 0x7E: the tie 432 goes to the even mantissa, 430 is nearer to 416.
    Block("ties_below_the_top", (448.0, 432.0, 430.0), (0x7E, 0x7E, 0x7D), 127),
    Block("mixed_signs", (-448.0, 1.0, -1.0, 0.5, -0.5), (0xFE, 0x38, 0xB8, 0x30, 0xB0), 127),
    # amax Inf: the largest scale, for which the kernel multiplies by 0. Inf * 0 is NaN, and that +448.
    Block("mixed_inf", (INF, 1.0, -1.0, 448.0), (0x7E, 0x00, 0x80, 0x00), 254),
    Block("minus_inf", (-INF, 2.0), (0x7E, 0x00), 254),
    Block("nan", (NAN, 448.0, -1.0), (0x7E, 0x7E, 0xB8), 127),  # amax is that of the others
    Block("nan_and_inf", (NAN, INF, 1.0), (0x7E, 0x7E, 0x00), 254),
    Block("nan_and_zero", (NAN, 0.0), (0x7E, 0x00), 0),
]


def tensor_of(block: Block, dtype: torch.dtype) -> Tensor | None:
    """[1, 32], or None if the dtype cannot hold an element."""
    exact = torch.tensor([block.x + (0.0,) * (BLOCK - len(block.x))], dtype=torch.float64)
    x = exact.to(dtype)
    return x if torch.equal(x.double().nan_to_num(nan=1e300), exact.nan_to_num(nan=1e300)) else None


def as_bytes(codes: Tensor) -> list[int]:
    return [int(code) for code in codes.view(torch.uint8).flatten()]


@pytest.fixture(scope="module")
def goldens() -> tuple[Tensor, Tensor, Tensor]:
    """Blocks BF16 [B, 32], and the codes and scale bytes that FlashInfer's CUDA quantizer made of them."""
    with np.load(GOLDENS) as file:
        x, codes, scales = file["input_bf16_bits"], file["payload_e4m3"], file["scale_e8m0"]
    return torch.from_numpy(x).view(torch.bfloat16), torch.from_numpy(codes), torch.from_numpy(scales)


@pytest.mark.parametrize("dtype", FLOATS)
def test_named_blocks(dtype: str) -> None:
    """Guards: each rule of the format, in each dtype that can express the block."""
    wrong, tried = [], 0
    for block in BLOCKS:
        x = tensor_of(block, FLOATS[dtype])
        if x is None:
            continue
        tried += 1
        codes, scales = quantize(x)
        expected = [*block.codes, *[0] * (BLOCK - len(block.codes))]
        if as_bytes(codes) != expected or scales.tolist() != [[block.scale]]:
            got = " ".join(f"{code:02x}" for code in as_bytes(codes)[: len(block.codes)])
            wrong.append(f"{block.name}: codes {got}, scale {scales.item()}; {block} is right")
    assert not wrong, "\n".join(wrong)
    assert tried >= {"bf16": 25, "fp16": 15, "fp32": len(BLOCKS)}[dtype]


def test_every_golden_block(goldens: tuple[Tensor, Tensor, Tensor]) -> None:
    """Guards: any difference from FlashInfer, over every BF16 bit pattern as amax and NaN and Inf blocks."""
    x, expected_codes, expected_scales = goldens
    assert len(x) == 70_854
    codes, scales = quantize(x)
    wrong = (codes.view(torch.uint8) != expected_codes).any(-1) | (scales[:, 0] != expected_scales)
    first = int(wrong.to(torch.uint8).argmax())
    assert not wrong.any(), (
        f"{int(wrong.sum())} blocks differ, first {first}: {x[first].tolist()} became "
        f"{as_bytes(codes[first])} under {int(scales[first])}, "
        f"not {expected_codes[first].tolist()} under {int(expected_scales[first])}"
    )


def scale_byte(amax: Fraction) -> int:
    """The smallest s in 0..254 with amax <= 448 * 2^(s-127), in exact arithmetic."""
    quotient = amax / 448
    e = (
        quotient.numerator.bit_length() - quotient.denominator.bit_length() - 1
    )  # 2^e < quotient, by at most 2 bits
    while Fraction(2) ** e < quotient:
        e += 1
    return max(0, e + 127)


@pytest.mark.parametrize(
    ("dtype", "patterns"), [("bf16", 0x7F80), ("fp16", 0x7C00)], ids=["bf16-32639", "fp16-31743"]
)
def test_the_scale_of_every_finite_amax(dtype: str, patterns: int) -> None:
    """Guards: a scale that is one off anywhere: floor or nearest instead of up, a logarithm near a power."""
    amax = torch.arange(1, patterns, dtype=torch.int16).view(FLOATS[dtype])
    x = torch.zeros(len(amax), BLOCK, dtype=amax.dtype)
    x[:, 7] = amax
    scales = quantize(x)[1][:, 0].tolist()
    wrong = [
        f"{value!r}: {got}, not {right}"
        for value, got in zip(amax.double().tolist(), scales, strict=True)
        if got != (right := scale_byte(Fraction(value)))
    ]
    assert not wrong, f"{len(wrong)} wrong, first {wrong[:5]}"


def test_the_scale_at_every_fp32_edge() -> None:
    """Guards: FP32 amax within an ulp of 448 * 2^e, where a product rounded otherwise changes the byte."""
    edges = [(1.75 + step * ULP) * 2.0**power for power in range(-117, 128) for step in (-1, 0, 1)]
    x = torch.zeros(len(edges), BLOCK)
    x[:, 31] = -torch.tensor(edges)
    exact = x[:, 31].abs().double().tolist()
    wrong = [
        f"{value!r}: {got}"
        for value, got in zip(exact, quantize(x)[1][:, 0].tolist(), strict=True)
        if got != scale_byte(Fraction(value))
    ]
    assert not wrong, wrong[:5]


def test_each_block_has_its_own_scale_in_any_shape() -> None:
    """Guards: scales along the wrong dimension, and leading dimensions that are flattened or lost."""
    exponents = torch.arange(2 * 3 * 2).view(2, 3, 2, 1)
    x = torch.ldexp(torch.full((2, 3, 2, BLOCK), 448.0), exponents).reshape(2, 3, 2 * BLOCK)
    codes, scales = quantize(x)
    assert codes.shape == (2, 3, 64)
    assert scales.tolist() == (127 + exponents[..., 0]).tolist()
    assert set(as_bytes(codes)) == {0x7E}
    assert torch.equal(dequantize(codes, scales), x)


def test_a_strided_x_is_read_as_it_is_seen() -> None:
    """Guards: blocks taken from memory order: every second row, and columns of something wider."""
    wide = torch.arange(8 * 96, dtype=torch.float32).view(8, 96)
    x = wide[::2, 32:]
    codes, scales = quantize(x)
    again = quantize(x.contiguous())
    assert as_bytes(codes) == as_bytes(again[0])
    assert scales.tolist() == again[1].tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_leaves_x_as_it_is(dtype: str) -> None:
    """Guards: FP32 that needs no conversion and is therefore scaled in place, the caller's weight with it."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(FLOATS[dtype])
    before = x.clone()
    quantize(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32), (3, 0)])
def test_nothing_quantizes_to_nothing(shape: tuple[int, ...]) -> None:
    """Guards: a reshape that fails on no elements."""
    codes, scales = quantize(torch.zeros(shape))
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], shape[-1] // BLOCK)
    assert dequantize(codes, scales).shape == shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantize_refuses_other_dtypes(dtype: torch.dtype) -> None:
    """Guards: integers quantized as if they were activations, FP64 cut short unasked."""
    with pytest.raises(TypeError, match="takes bfloat16, float16 or float32"):
        quantize(torch.zeros(1, BLOCK).to(dtype))


@pytest.mark.parametrize("shape", [(2, 33), (31,), ()], ids=str)
def test_quantize_refuses_a_part_of_a_block(shape: tuple[int, ...]) -> None:
    """Guards: blocks that run across rows."""
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.zeros(shape))


def decoded(code: int) -> Fraction:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = (
        Fraction(mantissa, 512)
        if exponent == 0
        else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    )
    return -value if sign else value


def test_dequantize_every_code_under_every_scale() -> None:
    """Guards: subnormal codes, byte 0 (2^-127, not 0) and the top of the range, all exact in float64."""
    numbers = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.zeros(255, 256, dtype=torch.uint8)
    codes[:, : len(numbers)] = torch.tensor(numbers, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 8).contiguous()
    values = dequantize(codes.view(torch.float8_e4m3fn), scales, torch.float64)[:, : len(numbers)]
    expected = [[float(decoded(code) * Fraction(2) ** (s - 127)) for code in numbers] for s in range(255)]
    assert values.tolist() == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dequantize_is_exact_where_the_dtype_is_normal(dtype: str) -> None:
    """Guards: a rounding in the way to BF16, which E4M3 times a power of two never needs."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    codes = numbers.repeat(236, 1).view(torch.float8_e4m3fn)
    scales = torch.arange(10, 246, dtype=torch.uint8)[:, None].expand(236, 8).contiguous()
    exact = dequantize(codes, scales, torch.float64)
    assert torch.equal(dequantize(codes, scales, FLOATS[dtype]).double(), exact)


def test_dequantize_nan() -> None:
    """Guards: a NaN code or scale that becomes a large number."""
    codes = torch.tensor([0x7F, 0xFF, *[0x38] * 62], dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    values = dequantize(codes, torch.tensor([[127, 255]], dtype=torch.uint8))
    assert values[0, :2].isnan().all()
    assert values[0, 2:32].tolist() == [1.0] * 30
    assert values[0, 32:].isnan().all()


@pytest.mark.parametrize(
    ("codes", "scales", "error"),
    [
        pytest.param(torch.uint8, torch.uint8, "codes are torch.uint8", id="codes-as-bytes"),
        pytest.param(torch.float8_e4m3fn, torch.float32, "scales torch.float32", id="float-scales"),
    ],
)
def test_dequantize_refuses_other_dtypes(codes: torch.dtype, scales: torch.dtype, error: str) -> None:
    """Guards: bytes taken as numbers: codes 0..255 or scales of 127.0."""
    with pytest.raises(TypeError, match=error):
        dequantize(torch.zeros(1, 32).to(codes), torch.zeros(1, 1).to(scales))


def test_dequantize_refuses_scales_of_another_shape() -> None:
    """Guards: scales that are broadcast or swizzled."""
    with pytest.raises(ValueError, match=r"scales are \[2, 1\]: codes \[2, 64\] need \[2, 2\]"):
        dequantize(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.zeros(2, 1, dtype=torch.uint8))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def assert_fake_is_quantize_dequantize(x: Tensor, out: Tensor) -> None:
    """Bitwise in finite blocks, the sign of zero included; NaN exactly where x is not finite."""
    expected = dequantize(*quantize(x), torch.bfloat16)
    finite = (
        x.unflatten(-1, (-1, BLOCK)).isfinite().all(-1, keepdim=True).expand(-1, -1, BLOCK).reshape(x.shape)
    )
    wrong = (finite & (bits(out) != bits(expected))).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} differ, first at {wrong[0].tolist()}: {x[tuple(wrong[0])].item()!r} became "
        f"{out[tuple(wrong[0])].item()!r}, not {expected[tuple(wrong[0])].item()!r}"
    )
    assert torch.equal(out.isnan(), ~x.isfinite())


@pytest.mark.parametrize("round_to", [fake_quantize, round_by_operators])
def test_fake_quantize_of_every_golden_block(
    round_to: Rounding, goldens: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Guards: the short way of rounding against the long one, for every BF16 pattern there is."""
    x = goldens[0]
    out = torch.empty_like(x)
    round_to(x, out)
    assert_fake_is_quantize_dequantize(x, out)


@pytest.mark.parametrize("round_to", [fake_quantize, round_by_operators])
@settings(deadline=None)  # a shared machine may pause for longer than any
@given(st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**32), st.booleans())
def test_fake_quantize_in_tiles_and_into_a_slice(
    round_to: Rounding, m: int, blocks: int, seed: int, narrow: bool
) -> None:
    """Guards: a row that a tile boundary moves, a workspace that remembers, columns beside the slice."""
    generator, k = torch.Generator().manual_seed(seed), blocks * BLOCK
    low, high = (
        (0x3F00, 0x4200) if narrow else (-0x8000, 0x8000)
    )  # magnitudes of one scale, or any bit pattern
    workspace = Workspace(m, k, torch.device("cpu"))
    wide = torch.full((m, k + 32), 7.0, dtype=torch.bfloat16)
    for _ in range(2):
        x = torch.randint(low, high, (m, k), generator=generator, dtype=torch.int16).view(torch.bfloat16)
        round_to(x, wide[:, :k], workspace)
        assert_fake_is_quantize_dequantize(x, wide[:, :k])
    assert (wide[:, k:] == 7.0).all()


@pytest.mark.parametrize("round_to", [fake_quantize, round_by_operators])
@pytest.mark.parametrize("m", [1, 31, 32, 33, 100], ids="rows{}".format)
def test_fake_quantize_of_more_rows_than_a_tile_holds(round_to: Rounding, m: int) -> None:
    """Guards: the rows of the last, shorter tile."""
    k, generator = 4096, torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator).mul_(torch.arange(1, m + 1)[:, None]).to(torch.bfloat16)
    workspace, out = Workspace(m, k, torch.device("cpu")), torch.empty(m, k, dtype=torch.bfloat16)
    assert workspace.rows == min(m, 32)
    round_to(x, out, workspace)
    assert_fake_is_quantize_dequantize(x, out)


def test_fake_quantize_leaves_x_as_it_is() -> None:
    """Guards: an x that is rounded in place, and rounded again by the next forward of the same buffer."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    before = x.clone()
    fake_quantize(x, torch.empty_like(x))
    assert torch.equal(x, before)


def test_fake_quantize_refuses_what_it_cannot_round() -> None:
    """Guards: FP32, whose 24 bits the addition of 2^20 steps would round twice; a part of a block."""
    with pytest.raises(TypeError, match="both have to be bfloat16"):
        fake_quantize(torch.zeros(1, 32), torch.zeros(1, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="K=33"):
        Workspace(1, 33, torch.device("cpu"))
