"""Byte positions: literal tiles, the index formulas stated again, and each layout with its inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemmwire_service.mxfp8.layout import (
    ScaleLayout,
    scale_size,
    shuffle_rows,
    shuffle_scales,
    swizzle,
    unshuffle_rows,
    unshuffle_scales,
    unswizzle,
)

LAYOUTS = list(ScaleLayout)
RAGGED_ROWS = (1, 7, 8, 127, 128, 129)
RAGGED_COLUMNS = (1, 3, 4, 5)

# Whose row the scales in each four bytes of a 128x4 tile are, 32 bytes a line: rows 32 apart side by side.
TILE_128X4_ROWS = """
 0 32 64  96    1 33 65  97    2 34 66  98    3 35 67  99
 4 36 68 100    5 37 69 101    6 38 70 102    7 39 71 103
 8 40 72 104    9 41 73 105   10 42 74 106   11 43 75 107
12 44 76 108   13 45 77 109   14 46 78 110   15 47 79 111
16 48 80 112   17 49 81 113   18 50 82 114   19 51 83 115
20 52 84 116   21 53 85 117   22 54 86 118   23 55 87 119
24 56 88 120   25 57 89 121   26 58 90 122   27 59 91 123
28 60 92 124   29 61 93 125   30 62 94 126   31 63 95 127
"""
# An 8x4 tile whose bytes are row and column as hexadecimal digits.
TILE_8X4 = "00010203 10111213 20212223 30313233 40414243 50515253 60616263 70717273"
# Where row s of each 32 goes.
SHUFFLED = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27]
SHUFFLED += [4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31]


def numbered(m: int, c: int) -> Tensor:
    """Distinct neighbours in both directions: no byte repeats within 251 positions."""
    return (torch.arange(m * c) % 251 + 1).to(torch.uint8).view(m, c)


def offset(layout: ScaleLayout, r: int, b: int, c: int) -> int:
    """The byte that holds (row r, block b), from FlashInfer's offset functions."""
    cp = (c + 3) // 4 * 4
    if layout is ScaleLayout.LINEAR:
        return r * c + b
    if layout is ScaleLayout.R8C4:
        return r // 8 * 8 * cp + b // 4 * 32 + r % 8 * 4 + b % 4
    return r // 128 * 128 * cp + b // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4


def placed(layout: ScaleLayout, scales: Tensor) -> Tensor:
    """swizzle, one byte at a time."""
    m, c = scales.shape
    flat = torch.zeros(scale_size(layout, m, c), dtype=torch.uint8)
    for r in range(m):
        for b in range(c):
            flat[offset(layout, r, b, c)] = scales[r, b]
    return flat


def test_a_128x4_tile_is_the_literal_one() -> None:
    """Guards: rows and columns of a tile exchanged, which data of one magnitude does not show."""
    rows = [int(row) for row in TILE_128X4_ROWS.split()]
    scales = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4)
    assert swizzle(scales, ScaleLayout.R128C4).tolist() == [row for row in rows for _ in range(4)]
    columns = torch.arange(4, dtype=torch.uint8).expand(128, 4)
    assert swizzle(columns, ScaleLayout.R128C4).tolist() == [0, 1, 2, 3] * 128


def test_an_8x4_tile_is_the_literal_one() -> None:
    """Guards: an 8x4 tile written column by column."""
    scales = torch.arange(8)[:, None] * 16 + torch.arange(4)
    expected = list(bytes.fromhex(TILE_8X4))
    assert swizzle(scales.to(torch.uint8), ScaleLayout.R8C4).tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("c", RAGGED_COLUMNS)
@pytest.mark.parametrize("m", RAGGED_ROWS)
def test_swizzle_follows_the_offset_formula_and_is_undone(layout: ScaleLayout, m: int, c: int) -> None:
    """Guards: tiles in the wrong order, padding that is not zero, an inverse that keeps the padding."""
    scales = numbered(m, c)
    flat = swizzle(scales, layout)
    assert flat.tolist() == placed(layout, scales).tolist()
    assert unswizzle(flat, layout, m, c).tolist() == scales.tolist()


@settings(deadline=None)  # a shared machine may pause for longer than any
@given(st.sampled_from(LAYOUTS), st.integers(1, 300), st.integers(1, 9), st.integers(0, 2**32))
def test_unswizzle_is_the_inverse_for_any_size(layout: ScaleLayout, m: int, c: int, seed: int) -> None:
    """Guards: sizes between those written out above."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(256, (m, c), generator=generator, dtype=torch.uint8)
    flat = swizzle(scales, layout)
    assert flat.shape == (scale_size(layout, m, c),)
    assert torch.equal(unswizzle(flat, layout, m, c), scales)


@pytest.mark.parametrize(
    ("layout", "m", "c", "size"),
    [
        (ScaleLayout.LINEAR, 3, 5, 15),
        (ScaleLayout.R8C4, 1, 1, 32),
        (ScaleLayout.R8C4, 9, 5, 16 * 8),
        (ScaleLayout.R128C4, 1, 1, 512),
        (ScaleLayout.R128C4, 129, 5, 256 * 8),
        (ScaleLayout.R128C4, 0, 4, 0),
    ],
)
def test_scale_size(layout: ScaleLayout, m: int, c: int, size: int) -> None:
    """Guards: a buffer that is allocated by another rule than it is filled by."""
    assert scale_size(layout, m, c) == size


def test_unswizzle_refuses_another_size() -> None:
    """Guards: scales of other rows read as these."""
    with pytest.raises(
        ValueError, match=r"\[512\] bytes are not the 8x4 scales of 128 rows of 8 blocks.*\[1024\]"
    ):
        unswizzle(torch.zeros(512, dtype=torch.uint8), ScaleLayout.R8C4, 128, 8)


def test_shuffle_moves_rows_by_the_table() -> None:
    """Guards: the inverse in place of the permutation: both are shuffles, one is the kernel's."""
    shuffled = shuffle_rows(torch.arange(96)[:, None]).flatten().tolist()
    expected = [0] * 96
    for row in range(96):
        expected[row // 32 * 32 + SHUFFLED[row % 32]] = row
    assert shuffled == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=["uint8", "e4m3"])
def test_unshuffle_is_the_inverse_and_moves_bytes_alone(dtype: torch.dtype) -> None:
    """Guards: values that change on the way, as a NaN code would in a conversion."""
    codes = torch.arange(64 * 4, dtype=torch.int32).to(torch.uint8).view(64, 4).view(dtype)
    back = unshuffle_rows(shuffle_rows(codes))
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


def test_shuffled_scales_follow_the_combined_formula() -> None:
    """Guards: scales that are swizzled without the shuffle that their weight rows got."""
    n, c, cp = 256, 5, 8
    scales = numbered(n, c)
    flat = shuffle_scales(scales)
    expected = torch.zeros(n * cp, dtype=torch.uint8)
    for r in range(n):
        for b in range(c):
            tile = r // 128 * 128 * cp + b // 4 * 512
            expected[tile + (8 * (r % 4) + r % 32 // 4) * 16 + r % 128 // 32 * 4 + b % 4] = scales[r, b]
    assert flat.tolist() == expected.tolist()
    assert unshuffle_scales(flat, n, c).tolist() == scales.tolist()


def test_shuffles_refuse_rows_that_need_padding() -> None:
    """Guards: padding after the shuffle, where it lands between the rows."""
    with pytest.raises(ValueError, match="33 rows are not a multiple of 32"):
        shuffle_rows(torch.zeros(33, 2))
    with pytest.raises(ValueError, match="N=130 is not a multiple of 128"):
        shuffle_scales(torch.zeros(130, 2, dtype=torch.uint8))
