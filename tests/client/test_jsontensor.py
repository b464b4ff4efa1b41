"""Numbers in JSON <-> bytes: every rounding rule as a literal, and every bit pattern of the 16-bit types."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest

from gemmwire.errors import WireError
from gemmwire.jsontensor import from_json, round_to_bf16, to_json

BF16_MAX = float.fromhex("0x1.fep127")


def halfwords(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 2}H", data))


def one(value: Any, datatype: str) -> int:
    """The bit pattern that one number becomes."""
    return int.from_bytes(from_json([value], datatype, (1,), "input 'x'"), "little")


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        # 0.01 lies between 0x3C23 (0.0099487) and 0x3C24 (0.0100098), nearer to the second
        pytest.param(0.01, 0x3C24, id="0.01-rounds-up"),
        # 1 + 2^-8 is half way from 1.0 (mantissa 0x00, even) to 1 + 2^-7 (0x01)
        pytest.param(1 + 2**-8, 0x3F80, id="tie-to-even-down"),
        pytest.param(1 + 3 * 2**-8, 0x3F82, id="tie-to-even-up"),
        pytest.param(1 + 2**-8 + 2**-20, 0x3F81, id="above-a-tie"),
        pytest.param(-(1 + 3 * 2**-8), 0xBF82, id="negative-tie"),
        pytest.param(2 - 2**-9, 0x4000, id="carry-into-the-exponent"),
        pytest.param(-0.0, 0x8000, id="minus-zero"),
        pytest.param(2.0**-133, 0x0001, id="smallest-subnormal"),
        pytest.param(2.0**-134, 0x0000, id="half-of-it-ties-to-zero"),
        pytest.param(3 * 2.0**-134, 0x0002, id="subnormal-tie"),
        pytest.param(BF16_MAX, 0x7F7F, id="largest"),
        # the midpoint to 2^128 and everything from there on is out of range
        pytest.param(float.fromhex("0x1.fefffep127"), 0x7F7F, id="just-below-overflow"),
        pytest.param(7, 0x40E0, id="integer"),
        pytest.param("NaN", 0x7FC0, id="NaN"),
        pytest.param("Infinity", 0x7F80, id="Infinity"),
        pytest.param("-Infinity", 0xFF80, id="-Infinity"),
    ],
)
def test_bf16_rounds_to_nearest_even(value: float, bits: int) -> None:
    """Guards: truncation, which is off by up to a whole step and always towards zero."""
    assert hex(one(value, "BF16")) == hex(bits)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        pytest.param(65504, 0x7BFF, id="largest"),
        pytest.param(65519.99, 0x7BFF, id="just-below-overflow"),
        pytest.param(-65519.99, 0xFBFF, id="just-above-minus-overflow"),
        pytest.param(1 + 2**-11, 0x3C00, id="tie-to-even-down"),
        pytest.param(1 + 3 * 2**-11, 0x3C02, id="tie-to-even-up"),
        # rounded to FP32 first it would be a tie and go down
        pytest.param(1 + 2**-11 + 2**-40, 0x3C01, id="rounded-once"),
        pytest.param(2.0**-24, 0x0001, id="smallest-subnormal"),
        pytest.param("-Infinity", 0xFC00, id="-Infinity"),
    ],
)
def test_fp16_rounds_to_nearest_even(value: float, bits: int) -> None:
    """Guards: the same for FP16, and a detour by way of FP32."""
    assert hex(one(value, "FP16")) == hex(bits)


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        pytest.param(65520, "FP16", id="fp16-midpoint"),
        pytest.param(-65520.0, "FP16", id="fp16-negative"),
        pytest.param(float.fromhex("0x1.ffp127"), "BF16", id="bf16-midpoint"),
        pytest.param(float.fromhex("0x1.ffffffp127"), "FP32", id="fp32-midpoint"),
        pytest.param(1e300, "BF16", id="bf16-beyond-fp32"),
        pytest.param(math.inf, "FP64", id="fp64-1e400"),
        pytest.param(10**308 * 10, "FP64", id="fp64-integer"),
    ],
)
def test_a_finite_number_never_becomes_an_infinity(value: float, datatype: str) -> None:
    """Guards: an overflow in the reader that looks like one in the caller's own arithmetic."""
    with pytest.raises(WireError, match=f"range of {datatype}") as caught:
        from_json([0.0, value], datatype, (2,), "input 'x'")
    assert caught.value.code == "value_invalid"


def test_a_refusal_names_the_element() -> None:
    """Guards: a search through a million numbers for the one that is too large."""
    with pytest.raises(WireError, match=r"^Input 'x': element 2 of 'data' is -70000.0, beyond"):
        from_json(["Infinity", 1, -7e4, 8e4], "FP16", (4,), "input 'x'")


@pytest.mark.parametrize("datatype", ["BF16", "FP16"])
def test_every_16_bit_pattern_survives(datatype: str) -> None:
    """Guards: a rounding or a missing digit on the way through decimal numbers; all NaNs read as one NaN."""
    patterns = np.arange(1 << 16, dtype="<u2")
    numbers = to_json(patterns.tobytes(), datatype)
    back = np.frombuffer(from_json(numbers, datatype, (1 << 16,), "x"), "<u2")

    nan = np.array([number == "NaN" for number in numbers])
    assert np.count_nonzero(nan) == (2 * 127 if datatype == "BF16" else 2 * 1023)
    assert np.array_equal(back[~nan], patterns[~nan])
    assert set(back[nan].tolist()) == {0x7FC0 if datatype == "BF16" else 0x7E00}


@pytest.mark.parametrize(
    ("datatype", "code"),
    [
        ("INT8", "b"), ("INT16", "h"), ("INT32", "i"), ("INT64", "q"),
        ("UINT8", "B"), ("UINT16", "H"), ("UINT32", "I"), ("UINT64", "Q"),
    ],
)  # fmt: skip
def test_integers_survive_to_their_limits(datatype: str, code: str) -> None:
    """Guards: 64-bit numbers by way of a float, and a wrap beyond a limit."""
    bits = 8 * struct.calcsize(f"<{code}")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if code.islower() else (0, (1 << bits) - 1)
    data = struct.pack(f"<3{code}", low, high, 1)

    assert from_json([low, high, 1], datatype, (3,), "x") == data
    assert to_json(data, datatype) == [low, high, 1]
    for beyond in (low - 1, high + 1):
        with pytest.raises(WireError, match=f"beyond the range of {datatype}"):
            from_json([0, beyond], datatype, (2,), "x")


def test_doubles_and_floats_are_exact() -> None:
    """Guards: digits that are dropped, in either direction."""
    for datatype, code, value in (("FP32", "f", 2.0**-149), ("FP64", "d", 5e-324), ("FP64", "d", 0.1)):
        data = struct.pack(f"<{code}", value)
        assert to_json(data, datatype) == [value]
        assert from_json([value], datatype, (1,), "x") == data


def test_booleans_are_true_and_false() -> None:
    """Guards: 0 and 1 in JSON, which other servers refuse."""
    assert to_json(b"\1\0", "BOOL") == [True, False]
    assert from_json([True, False], "BOOL", (2,), "x") == b"\1\0"


def test_non_finite_numbers_are_strings() -> None:
    """Guards: NaN as a bare word, which is not JSON."""
    data = struct.pack("<4f", math.nan, math.inf, -math.inf, 1)
    assert to_json(data, "FP32") == ["NaN", "Infinity", "-Infinity", 1.0]


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        pytest.param([1, 2, 3, 4, 5, 6], (2, 3), id="flat"),
        pytest.param([[1, 2, 3], [4, 5, 6]], (2, 3), id="nested"),
        pytest.param([[[1], [2], [3]], [[4], [5], [6]]], (2, 3, 1), id="nested-three-deep"),
        pytest.param([[1, 2, 3, 4, 5, 6]], (1, 6), id="one-row"),
    ],
)
def test_flat_and_nested_data_are_the_same(data: list[Any], shape: tuple[int, ...]) -> None:
    """Guards: one of the two forms that the protocol allows refused, or read column by column."""
    assert from_json(data, "UINT8", shape, "x") == bytes([1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        pytest.param([], (0,), id="no-elements"),
        pytest.param([], (0, 5), id="no-rows"),
        pytest.param([[], []], (2, 0), id="empty-rows"),
        pytest.param([], (2, 0, 3), id="flat"),
    ],
)
@pytest.mark.parametrize("datatype", ["BF16", "FP32", "INT8"])
def test_an_empty_tensor_has_no_bytes(data: list[Any], shape: tuple[int, ...], datatype: str) -> None:
    """Guards: an error of the array library for zero elements."""
    assert from_json(data, datatype, shape, "x") == b""
    assert to_json(b"", datatype) == []


def test_rounding_keeps_nan_a_nan() -> None:
    """Guards: a NaN whose set bits are all below the cut, which an addition carries into infinity or zero."""
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FA00000], dtype="<u4")
    rounded = round_to_bf16(bits.view("<f4"))
    assert [hex(value) for value in rounded.tolist()] == ["0x7fc0", "0x7fff", "0xffff", "0xffc0", "0x7fe0"]


def test_rounding_agrees_with_every_upper_half() -> None:
    """Guards: a carry that is lost for some of the 2^16 upper halves, at its tie or beside it."""
    upper = np.arange(1 << 16, dtype="<u4")
    finite = upper[(upper & 0x7F80) != 0x7F80]
    for lower, step in ((0x0000, 0), (0x7FFF, 0), (0x8001, 1), (0xFFFF, 1)):
        rounded = round_to_bf16(((finite << 16) | lower).view("<f4"))
        assert np.array_equal(rounded, finite + step), hex(lower)
    ties = round_to_bf16(((finite << 16) | 0x8000).view("<f4"))
    assert np.array_equal(ties, finite + (finite & 1))
