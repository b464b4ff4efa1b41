"""Rows of x that came quantized -> BF16 rows that quantize to the same bytes again.

So the backends go on as if the client had sent x in BF16. The numbers themselves would not do. A block whose
largest element was rounded down to 224 * 2^e is one of 448 * 2^(e-1) to the quantizer, which may flush it;
226 is rounded to 224 too, and keeps the scale as it was. And 256 * 2^120, to which the largest BF16 is
rounded, is none itself; 255 is rounded to 256 at every scale.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .format import BLOCK, power

_INSTEAD = {224: 226, 256: 255}
_SHIFTED = torch.tensor(0x87F0 - 0x10000, dtype=torch.int16)
_REBIAS = torch.tensor(2.0**120, dtype=torch.bfloat16)


def _bits_by_code() -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """The BF16 bits that stand for each of the 256 codes; both NaN codes are NaN."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    for number, other in _INSTEAD.items():
        numbers[numbers == number], numbers[numbers == -number] = other, -other
    bits: np.ndarray[tuple[int], np.dtype[np.int16]] = numbers.view(torch.int16).numpy()
    return bits


_BITS = _bits_by_code()


def rows_of(codes: Tensor, scales: Tensor) -> Tensor:
    """codes uint8 [m, K], scales uint8 [m, ceil(K/32)], on a CPU -> BF16 [m, K].

    `quantize` gives codes and scales back, byte for byte, where they are those of BF16 numbers. Of others it
    gives the same numbers, as far as BF16 holds them and the quantizer does not flush them (a block below
    2^-118): what is above BF16's range becomes an infinity. NaN codes and scale byte 255 are NaN.
    """
    m, k = codes.shape
    # By NumPy, whose table look-up takes half the time of the arithmetic that would do.
    rows = torch.from_numpy(np.take(_BITS, codes.numpy())).view(torch.bfloat16)
    powers = power(scales).to(torch.bfloat16)
    if k % BLOCK:
        return rows.mul_(powers.repeat_interleave(BLOCK, 1)[:, :k])
    rows.view(m, -1, BLOCK).mul_(powers[..., None])
    return rows


def widen(codes: Tensor, out: Tensor) -> None:
    """E4M3 -> BF16, exact but for its NaN, which becomes 480. By integers, because that is six times as fast
    as torch's conversion on a CPU.

    The sign and the 7 bits behind it go where BF16 has sign, exponent and mantissa. As a BF16 they stand for
    2^(7-127) of the number, subnormals too.
    """
    out.view(torch.int16).copy_(codes.view(torch.int8)).bitwise_left_shift_(4).bitwise_and_(_SHIFTED)
    out.mul_(_REBIAS)
