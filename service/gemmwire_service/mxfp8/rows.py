"""Rows of x that came quantized -> BF16 rows that quantize to the same bytes again.

So the backends go on as if the client had sent x in BF16. The numbers themselves would not do. A block whose
largest element was rounded down to 224 * 2^e is one of 448 * 2^(e-1) to the quantizer, which may flush it;
226 is rounded to 224 too, and keeps the scale as it was. And 256 * 2^120, to which the largest BF16 is
rounded, is none itself; 255 is rounded to 256 at every scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import BLOCK, power

_MAGNITUDE = 0x7F
_NAN = 0x7F  # E4M3's, without its sign
_224, _256 = 0x76, 0x78
_SHIFTED = torch.tensor(0x87F0 - 0x10000, dtype=torch.int16)
_REBIAS = torch.tensor(2.0**120, dtype=torch.bfloat16)


def rows_of(codes: Tensor, scales: Tensor) -> Tensor:
    """codes uint8 [m, K], scales uint8 [m, ceil(K/32)], on a CPU -> BF16 [m, K].

    `quantize` gives codes and scales back, byte for byte, where they are those of BF16 numbers. Of others it
    gives the same numbers, as far as BF16 holds them and the quantizer does not flush them (a block below
    2^-118): what is above BF16's range becomes an infinity. NaN codes and scale byte 255 are NaN.
    """
    m, k = codes.shape
    padded = torch.zeros(m, scales.shape[1] * BLOCK, dtype=torch.bfloat16)
    rows = padded[:, :k]
    magnitude = codes & _MAGNITUDE
    _spread(codes, rows)
    bits = rows.view(torch.int16)
    bits.add_((magnitude == _224).to(torch.int16), alpha=2)  # 226
    bits.sub_((magnitude == _256).to(torch.int16))  # 255
    rows.mul_(_REBIAS)
    nan = magnitude == _NAN
    if nan.any():
        rows.masked_fill_(nan, float("nan"))
    padded.view(m, -1, BLOCK).mul_(power(scales).to(torch.bfloat16)[..., None])
    return rows


def widen(codes: Tensor, out: Tensor) -> None:
    """E4M3 -> BF16, exact but for its NaN, which becomes 480. By integers, because that is six times as fast
    as torch's conversion on a CPU."""
    _spread(codes, out)
    out.mul_(_REBIAS)


def _spread(codes: Tensor, out: Tensor) -> None:
    """The sign and the 7 bits behind it go where BF16 has sign, exponent and mantissa. As a BF16 they stand
    for 2^(7-127) of the number, subnormals too."""
    out.view(torch.int16).copy_(codes.view(torch.int8)).bitwise_left_shift_(4).bitwise_and_(_SHIFTED)
