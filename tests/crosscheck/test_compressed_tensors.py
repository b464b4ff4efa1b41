"""compressed-tensors' MXFP8 on the same tensors: its rule is another at one mantissa and at the ends.

It adds a quarter to the mantissa of amax and takes the exponent: at 1.75 exactly the scale is one higher than
ours, where 448 itself fits. docs/accuracy.md says what the differences mean.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from edge_blocks import (
    PLACE,
    assert_exactly,
    assert_same_bytes,
    bf16_patterns,
    exponents,
    finite,
    goldens,
    one_in_a_block,
)
from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize

pytestmark = [
    pytest.mark.crosscheck,
    pytest.mark.skipif(
        find_spec("compressed_tensors") is None,
        reason="compressed-tensors, which needs Python 3.11, is not installed: ./dev test-crosscheck",
    ),
]

AT_448 = 96  # the mantissa of 1.75 * 2^e, of 7 bits


def theirs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales, uint8 [B, 32] and [B, 1], as its compressor stores a weight."""
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle import forward
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments: Any = preset_name_to_scheme("MXFP8", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments)
    codes = forward.quantize(x, scale, zero, arguments, dtype=torch.float8_e4m3fn)
    return codes.view(torch.uint8), compress_mx_scale(scale, torch.uint8)


def ours(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(x)
    return codes.view(torch.uint8), scales


def inner(exponent: Tensor) -> Tensor:
    """Where neither rule is at an end: byte 0 ends at 1.75 * 2^-119, exponent 254 is the last."""
    return (exponent > 8) & (exponent < 254)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_amax_but_448_times_a_power_has_the_same_scale(dtype: torch.dtype) -> None:
    """Guards: a page that says where it differs. Of 62720 amax the 490 of mantissa 1.75, each by one."""
    amax = bf16_patterns()
    exponent, mantissa = exponents(amax)
    chosen = inner(exponent)
    x = one_in_a_block(amax[chosen].to(dtype))
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(x)
    differs = mantissa[chosen] == AT_448
    assert (len(x), int(differs.sum())) == (62720, 490)
    assert torch.equal(their_scales.int() - scales.int(), differs[:, None].int())
    assert_exactly((codes != their_codes).any(-1), differs, x)
    for sign in (0x00, 0x80):  # 448 and 224, under scales that make the same number of them
        at = differs & (x[:, PLACE].signbit() == bool(sign))
        assert set(codes[at, PLACE].tolist()) == {0x7E | sign}
        assert set(their_codes[at, PLACE].tolist()) == {0x76 | sign}


def test_the_golden_blocks() -> None:
    """Guards: elements that are rounded otherwise under the same scale. A zero point is added to theirs, so
    that a negative zero loses its sign; one that an element is rounded to keeps it."""
    x = goldens()
    amax = x.abs().amax(-1)
    exponent, mantissa = exponents(amax)
    x = x[finite(x) & inner(exponent) & (mantissa != AT_448)]
    assert len(x) > 60_000
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(x)
    assert_same_bytes(scales, their_scales, x)
    assert bool(((x == 0) & (codes == 0x80)).any())
    assert_same_bytes(codes.masked_fill(x == 0, 0), their_codes, x)


def test_a_scale_one_higher_costs_the_small_elements_a_bit() -> None:
    """Guards: a difference that is called harmless. Under their scale, elements that E4M3 holds as subnormals
    lose a bit: 2^-9, the smallest under scale 127, is a tie under 128 and goes to zero."""
    x = one_in_a_block(torch.tensor([448.0]))
    x[0, 0], x[0, 1] = 2.0**-9, 3 * 2.0**-9
    for (codes, scales), kept in ((ours(x), [2.0**-9, 3 * 2.0**-9]), (theirs(x), [0.0, 4 * 2.0**-9])):
        assert dequantize(codes.view(torch.float8_e4m3fn), scales)[0, :2].tolist() == kept


def test_below_byte_1_theirs_are_numbers_and_ours_zeros() -> None:
    """Byte 0 stands for 2^-127. Theirs divides by it; FlashInfer's kernel, and so ours, flushes the block."""
    amax = bf16_patterns()
    exponent, mantissa = exponents(amax)
    chosen = (exponent < 8) | ((exponent == 8) & (mantissa < AT_448))
    x = one_in_a_block(amax[chosen])
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(x)
    assert_same_bytes(scales, their_scales, x)
    assert set(scales.flatten().tolist()) == {0}
    assert not bool((codes & 0x7F).any())
    exact = (x.double() * 2.0**127).float().to(torch.float8_e4m3fn).view(torch.uint8)
    assert_same_bytes(their_codes, exact.masked_fill(x == 0, 0), x)
    assert set(their_codes[:, PLACE].tolist()) >= {0x08, 0x88, 0x7E, 0xFE}


def test_its_largest_amax_become_zeros() -> None:
    """From 1.75 * 2^127 on, with a quarter more the mantissa overflows BF16. Their scale is infinite, their
    elements are zeros, and what is stored of the scale is byte 127. Ours has numbers up to the last."""
    amax = bf16_patterns()
    exponent, mantissa = exponents(amax)
    x = one_in_a_block(amax[(exponent == 254) & (mantissa >= AT_448)])
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(x)
    assert (set(scales.flatten().tolist()), set(their_scales.flatten().tolist())) == ({246, 247}, {127})
    assert set((codes[:, PLACE] & 0x7F).tolist()) == {0x76, 0x77, 0x78, 0x7E}
    assert not bool((their_codes & 0x7F).any())
