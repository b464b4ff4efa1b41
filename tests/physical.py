"""MXFP8 as the bytes lie in memory, in NumPy and by the published index formulas alone.

What the kernel simulators compute with. It shares no code with the service, so that a layout which is wrong
in the service is not wrong here in the same way.

    8x4      (r//8)*8*cp     + (b//4)*32  + (r%8)*4   + b%4
    128x4    (r//128)*128*cp + (b//4)*512 + (r%32)*16 + ((r%128)//32)*4 + b%4

is the byte of (row r, block b), where cp is the number of blocks rounded up to a multiple of 4. A shuffled
matrix holds, within each 32 rows, row 4*(d%8) + d//8 of the original at place d.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Places = NDArray[np.int64]

BEYOND = 0x8F
"""What a kernel reads behind the end of a buffer: 2^16, so that it does not pass for a zero."""


def _e4m3() -> Floats:
    """The number each code stands for: bias 7, subnormals below 2^-6, and NaN at 0x7F and 0xFF only."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.where(code < 128, magnitude, -magnitude)


E4M3 = _e4m3()
E8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan)
_MAGNITUDES = E4M3[:127]
_TIES = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def linear(rows: int, blocks: int) -> Places:
    return np.arange(rows * blocks).reshape(rows, blocks)


def tiled_8x4(rows: int, blocks: int) -> Places:
    r, b, width = _grid(rows, blocks)
    places: Places = r // 8 * 8 * width + b // 4 * 32 + r % 8 * 4 + b % 4
    return places


def tiled_128x4(rows: int, blocks: int) -> Places:
    r, b, width = _grid(rows, blocks)
    places: Places = r // 128 * 128 * width + b // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4
    return places


def _grid(rows: int, blocks: int) -> tuple[Any, Any, int]:
    r, b = np.ogrid[:rows, :blocks]
    return r, b, (blocks + 3) // 4 * 4


def length(rows: int, blocks: int, tile_rows: int) -> int:
    """Bytes of the scales of `rows` rows in tiles of `tile_rows` by 4."""
    return -(-rows // tile_rows) * tile_rows * (-(-blocks // 4) * 4)


def scales_at(buffer: Bytes, places: Places) -> Bytes:
    """The scale of each row and block; as a kernel does, without a look at where the buffer ends."""
    needed = int(places.max(initial=-1)) + 1 - len(buffer)
    return np.append(buffer, np.full(max(needed, 0), BEYOND, np.uint8))[places]


def placed(scales: Bytes, places: Places, size: int) -> Bytes:
    """The buffer that holds each scale at its place, and zeros between."""
    buffer = np.zeros(size, np.uint8)
    buffer[places] = scales
    return buffer


def unshuffled(matrix: Bytes) -> Bytes:
    """Rows in their original order."""
    d = np.arange(len(matrix))
    original = np.empty_like(matrix)
    original[d // 32 * 32 + 4 * (d % 8) + d % 32 // 8] = matrix
    return original


def numbers(codes: Bytes, scales: Bytes) -> Floats:
    """codes [rows, k], scales [rows, k/32] -> what they stand for, exactly."""
    product: Floats = E4M3[codes] * E8M0[scales].repeat(32, axis=1)
    return product


def quantized(x: Floats) -> tuple[Bytes, Bytes]:
    """[rows, k] -> codes [rows, k] and scales [rows, k/32], as the CUDA kernel has them.

    The scale is amax/448 rounded up to a power of two, where amax counts no NaN; an element is divided by it,
    or zero at both ends of the range, and what is NaN then becomes +448.
    """
    blocks = x.reshape(len(x), -1, 32)
    amax = np.where(np.isnan(blocks), 0, np.abs(blocks)).max(-1).astype(np.float32)
    fraction, exponent = np.frexp((amax * np.float32(1 / 448)).astype(np.float64))
    power = np.where(fraction == 0.5, exponent - 1, exponent)
    scales = np.where(np.isinf(amax), 254, np.where(amax == 0, 0, np.clip(power + 127, 0, 254)))
    inner = (scales > 0) & (scales < 254)
    with np.errstate(invalid="ignore"):
        elements = blocks * np.where(inner, 2.0 ** (127.0 - scales), 0)[..., None]
    elements[np.isnan(elements)] = 448
    return _nearest(elements).reshape(x.shape), scales.astype(np.uint8)


def _nearest(elements: Floats) -> Bytes:
    """The codes of the nearest E4M3 numbers; of two as near, the one with an even code."""
    magnitude = np.minimum(np.abs(elements), 448)
    code = np.searchsorted(_TIES, magnitude)  # of a tie, the lower
    tie = _TIES[np.minimum(code, len(_TIES) - 1)] == magnitude
    code += tie & (code % 2 == 1)
    return (code | np.signbit(elements) << 7).astype(np.uint8)
