"""Rows to MXFP8 before they are sent: 1.03 bytes an element, where bfloat16 has 2 and float32 has 4.

The bytes are those of FlashInfer's CUDA quantizer, and the server's. A block is 32 neighbours along K. With
the exponent field e and the mantissa field f (7 bits) of its largest magnitude in bfloat16, its scale byte is

    s = e - 8 + (f > 96), at least 0,

because 448, the largest E4M3 number, is 1.75 * 2^8, and 1 + 96/128 is 1.75. Each element becomes the E4M3
number nearest to x / 2^(s-127), ties to even. Format: OCP Microscaling Formats (MX) 1.0, MXFP8 E4M3.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .arrays import framework_of

if TYPE_CHECKING:
    import numpy as np
    import torch

BLOCK = 32
NAN_SCALE = 255  # E8M0 has one NaN, which makes every element of its block one

_INFINITE_SCALE = 254  # what the kernel gives a block that holds an infinity
_LARGEST = 0x7E  # E4M3's 448
_INFINITY = 0x7F80  # bfloat16's, as bits
_ROUND_UP = 31  # carries into the exponent field exactly if f > 96
# Below this scale byte x may be a subnormal bfloat16, whose exponent field is not its exponent.
_SUBNORMAL_BELOW = 24
_TILE = 1 << 19  # elements, whose FP32 stays in the caches of a core


def quantize(x: Any, *, marked: bool = False) -> tuple[Any, Any]:
    """The E4M3 codes and the E8M0 scale bytes of x [..., K], uint8 [..., K] and uint8 [..., ceil(K/32)].

    x: a torch tensor, whose device the result has, or a NumPy array, of bfloat16, or of float16 or float32,
    which are rounded to bfloat16 first (to nearest even), as a server does. The last block of a K that is no
    multiple of 32 is that of x with zeros behind it.

    A block with a NaN or an infinity gets what the kernel makes of it (a NaN becomes 448 and does not count
    for the scale; an infinity becomes 448, whatever its sign, beside zeros) or, where `marked`, scale byte
    255, which a server answers as it does a NaN: with NaN in the whole row.
    Errors: `InputError`.
    """
    return framework_of(x).quantize(x, marked)


def torch_blocks(x: torch.Tensor, marked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 [blocks, 32] -> uint8 [blocks, 32] and uint8 [blocks], on its device."""
    import torch

    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    step = _TILE // BLOCK if x.device.type == "cpu" else max(1, len(x))
    for start in range(0, len(x), step):
        tile = slice(start, start + step)
        _torch_tile(x[tile].to(torch.float32, copy=True), codes[tile], scales[tile], marked)
    return codes, scales


def _torch_tile(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, marked: bool) -> None:
    """x: FP32 [blocks, 32] of BF16 numbers, overwritten."""
    import torch

    # Positive floats order as their bits do, and the bits of a NaN are the largest.
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    largest = magnitude.amax(-1)
    finite = largest < _INFINITY << 16
    special = None if bool(finite.all()) else x.isfinite().logical_not_()
    if special is not None:
        largest = magnitude.masked_fill_(x.isnan(), 0).amax(-1)
    scale = (((largest + (_ROUND_UP << 16)) >> 23) - 8).clamp_(min=0)
    # 2^(127-s), but 0 for byte 0: the kernel flushes such a block.
    inverse = ((254 - scale) << 23).mul_(scale > 0).view(torch.float32)
    codes.view(torch.float8_e4m3fn).copy_(x.mul_(inverse[:, None]))
    scales.copy_(scale)
    if special is not None:
        _torch_special(largest, special, codes, scales)
        if marked:
            scales.masked_fill_(~finite, NAN_SCALE)


def _torch_special(
    largest: torch.Tensor, special: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """What the kernel makes of blocks with a NaN or an infinity, in elements that are `special`."""
    infinite = largest >= _INFINITY << 16
    scales.masked_fill_(infinite, _INFINITE_SCALE)
    codes.bitwise_and_(0x80 | infinite.logical_not()[:, None] * 0x7F)  # zeros, with their signs
    codes.masked_fill_(special, _LARGEST)


def numpy_blocks(
    bits: np.ndarray[Any, np.dtype[np.uint16]], marked: bool
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.uint8]]]:
    """The bits of BF16 [blocks, 32] -> uint8 [blocks, 32] and uint8 [blocks]."""
    import numpy as np

    codes = np.empty(bits.shape, np.uint8)
    scales = np.empty(len(bits), np.uint8)
    for start in range(0, len(bits), _TILE // BLOCK):
        tile = slice(start, start + _TILE // BLOCK)
        codes[tile], scales[tile] = _numpy_tile(bits[tile], marked)
    return codes, scales


def _numpy_tile(
    bits: np.ndarray[Any, np.dtype[np.uint16]], marked: bool
) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.uint8]]]:
    import numpy as np

    magnitude = bits & np.uint16(0x7FFF)
    largest = _largest(magnitude)
    finite = largest < _INFINITY
    if not finite.all():
        largest = _largest(np.where(magnitude > _INFINITY, np.uint16(0), magnitude))
    scale = np.maximum((largest + _ROUND_UP) >> 7, 8) - 8
    codes = np.take(_code_table(), magnitude - (scale << 7)[:, None])
    small = scale < _SUBNORMAL_BELOW
    if small.any():
        codes[small] = _codes(_quotient(magnitude[small], scale[small]))
    codes |= (bits >> 8).astype(np.uint8) & 0x80
    scales = scale.astype(np.uint8)
    if not finite.all():
        infinite = largest == _INFINITY
        scales[infinite] = _INFINITE_SCALE
        codes[infinite] &= 0x80
        codes[magnitude >= _INFINITY] = _LARGEST
        if marked:
            scales[~finite] = NAN_SCALE
    return codes, scales


def _largest(magnitude: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Of each block, by halves: NumPy reduces a short last axis at half the speed."""
    import numpy as np

    half = BLOCK // 2
    while half:
        magnitude = np.maximum(magnitude[:, :half], magnitude[:, half : 2 * half])
        half //= 2
    return magnitude[:, 0]


@cache
def _code_table() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The code of each difference between the bits of a normal BF16 magnitude and those of 2^(s-127).

    The difference is a BF16 too, but that its exponent has no bias and may be negative.
    """
    import numpy as np

    difference = np.arange(1 << 16, dtype=np.uint16).view(np.int16).astype(np.int32)
    return _codes(np.ldexp(128.0 + (difference & 127), (difference >> 7) - 7))


def _codes(value: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The E4M3 code nearest to each number from 0, ties to even; what is above 448 has no right one."""
    import numpy as np

    value = np.minimum(value, 448.0)
    exponent = np.frexp(np.maximum(value, 2.0**-6))[1] - 1
    eighths = np.rint(np.ldexp(value, 3 - exponent)).astype(np.int32)
    codes: np.ndarray[Any, np.dtype[np.uint8]] = (((exponent + 6) << 3) + eighths).astype(np.uint8)
    return codes


def _quotient(
    magnitude: np.ndarray[Any, np.dtype[np.uint16]], scale: np.ndarray[Any, np.dtype[np.uint16]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|x| / 2^(s-127), and 0 for byte 0, where the kernel flushes the block."""
    import numpy as np

    kept = np.where(scale[:, None] == 0, 0, magnitude).astype(np.uint32)
    x = (kept << 16).view(np.float32).astype(np.float64)
    quotient: np.ndarray[Any, np.dtype[np.float64]] = np.ldexp(x, 127 - scale.astype(np.int32)[:, None])
    return quotient


def bfloat16_bits(x: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """float32, float16 or bfloat16 -> the bits of the nearest BF16, ties to even; a NaN stays one."""
    import numpy as np

    if x.dtype.name == "bfloat16":
        return x.view(np.uint16)
    bits = x.astype(np.float32, copy=False).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded)
