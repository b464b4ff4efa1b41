"""The simulators themselves: what they compute with is held against the GPU's own bytes and literal tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import physical

GOLDENS = Path(__file__).parent / "goldens" / "mxfp8_quantize_cuda.npz"


def test_quantizing_gives_the_bytes_of_the_gpu() -> None:
    """Guards: a simulated quantizer that agrees with the service's because both are wrong."""
    goldens = np.load(GOLDENS)
    x = torch.from_numpy(goldens["input_bf16_bits"].view(np.int16)).view(torch.bfloat16).double().numpy()
    codes, scales = physical.quantized(x)
    np.testing.assert_array_equal(scales[:, 0], goldens["scale_e8m0"])
    np.testing.assert_array_equal(codes, goldens["payload_e4m3"])


def test_e4m3_is_torchs() -> None:
    """Guards: subnormals, the two NaN, or a bias that is off by one."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(physical.E4M3, codes)


def test_e8m0_is_torchs() -> None:
    scales = torch.arange(1, 256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().double().numpy()
    np.testing.assert_array_equal(physical.E8M0[1:], scales)
    assert physical.E8M0[0] == 2.0**-127


@pytest.mark.parametrize(
    ("place", "row", "block", "byte"),
    [
        (physical.tiled_8x4, 0, 1, 1),
        (physical.tiled_8x4, 1, 0, 4),
        (physical.tiled_8x4, 7, 3, 31),
        (physical.tiled_8x4, 0, 4, 32),  # the next tile along K
        (physical.tiled_8x4, 8, 0, 64),  # the next along M, behind two along K
        (physical.tiled_128x4, 1, 0, 16),
        (physical.tiled_128x4, 32, 0, 4),
        (physical.tiled_128x4, 127, 3, 511),
        (physical.tiled_128x4, 0, 4, 512),
        (physical.tiled_128x4, 128, 0, 1024),
        (physical.linear, 1, 0, 5),
    ],
)
def test_places(place: Callable[[int, int], physical.Places], row: int, block: int, byte: int) -> None:
    """Guards: the formulas, for 129 rows of five blocks, which are padded to eight."""
    assert place(129, 5)[row, block] == byte


@pytest.mark.parametrize(("tile_rows", "place"), [(8, physical.tiled_8x4), (128, physical.tiled_128x4)])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (9, 5), (129, 4), (300, 12)])
def test_every_scale_has_a_place_of_its_own(
    tile_rows: int, place: Callable[[int, int], physical.Places], rows: int, blocks: int
) -> None:
    """Guards: two scales in one byte, and a place behind the buffer."""
    places = place(rows, blocks)
    assert len(np.unique(places)) == rows * blocks
    assert places.max() < physical.length(rows, blocks, tile_rows)
    scales = np.arange(rows * blocks, dtype=np.uint8).reshape(rows, blocks)
    buffer = physical.placed(scales, places, physical.length(rows, blocks, tile_rows))
    np.testing.assert_array_equal(physical.scales_at(buffer, places), scales)


def test_reading_behind_a_buffer_does_not_pass_for_zero() -> None:
    """Guards: a buffer that is too short, read without a check as a kernel would, seen by nobody."""
    scales = physical.scales_at(np.zeros(4, np.uint8), physical.tiled_8x4(2, 1))
    assert scales.tolist() == [[0], [physical.BEYOND]]


def test_a_shuffled_row_is_found_at_the_published_place() -> None:
    """Guards: the inverse in place of the permutation. Row s goes to 8*(s%4) + s//4."""
    shuffled = np.empty((64, 1), np.uint8)
    for row in range(64):
        shuffled[row // 32 * 32 + 8 * (row % 4) + row % 32 // 4] = row
    assert physical.unshuffled(shuffled)[:, 0].tolist() == list(range(64))
