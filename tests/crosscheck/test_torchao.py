"""TorchAO's MX formats on the same tensors: the same bytes in its RCEIL mode, and its other modes to the bit.

docs/accuracy.md says what the differences mean.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fidelity import floor
from torch import Tensor

from edge_blocks import (
    PLACE,
    assert_exactly,
    assert_same_bytes,
    bf16_patterns,
    exponents,
    finite,
    fp32_edges,
    goldens,
    one_in_a_block,
)
from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize

pytestmark = [
    pytest.mark.crosscheck,
    pytest.mark.skipif(
        find_spec("torchao") is None, reason="torchao is not installed: ./dev test-crosscheck"
    ),
]


@pytest.fixture(scope="module")
def torchao() -> Any:
    from torchao.prototype.mx_formats import config, mx_tensor

    class Both:
        to_mx, to_dtype = staticmethod(mx_tensor.to_mx), staticmethod(mx_tensor.to_dtype)
        mode = config.ScaleCalculationMode

    return Both


def theirs(torchao: Any, x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Codes and scales, uint8 [B, 32] and [B, 1]."""
    scales, codes = torchao.to_mx(x.contiguous(), torch.float8_e4m3fn, BLOCK, torchao.mode[mode])
    return codes.view(torch.uint8), scales.view(torch.uint8)


def ours(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(x)
    return codes.view(torch.uint8), scales


def random_fp32() -> Tensor:
    """[100000, 32] of any bits, and as many of one magnitude."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000, BLOCK), generator=generator).int()
    return torch.cat([bits.view(torch.float32), torch.randn(100_000, BLOCK, generator=generator)])


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(goldens, id="goldens"),
        pytest.param(lambda: one_in_a_block(bf16_patterns()), id="every-amax-bf16"),
        pytest.param(lambda: one_in_a_block(bf16_patterns().float()), id="every-amax-fp32"),
        pytest.param(random_fp32, id="random-fp32"),
        pytest.param(lambda: torch.zeros(2, BLOCK) * torch.tensor([[1.0], [-1.0]]), id="zeros"),
    ],
)
def test_rceil_gives_our_bytes_for_every_finite_block(torchao: Any, blocks: Any) -> None:
    """Guards: a quantizer that agrees with FlashInfer's alone."""
    x = blocks()
    x = x[finite(x)]
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(torchao, x, "RCEIL")
    assert_same_bytes(scales, their_scales, x)
    assert_same_bytes(codes, their_codes, x)


def test_rceil_of_fp32_close_above_448_is_its_logarithm(torchao: Any) -> None:
    """Guards: a scale of ours that is one too high. Theirs is ceil(log2(amax / 448)) in FP32, whose logarithm
    of what is an ulp or a few above a power of two is that of the power: one lower, exactly there."""
    x = one_in_a_block(fp32_edges())
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(torchao, x, "RCEIL")
    quotient = x.amax(-1, keepdim=True) / 448
    logarithm = torch.log2(quotient)
    lost = (logarithm == logarithm.round()) & (quotient.double() > torch.exp2(logarithm.double()))
    assert 200 < int(lost.sum()) < 1000
    assert torch.equal(scales.int() - their_scales.int(), lost.int())
    assert_exactly((codes != their_codes).any(-1), lost[:, 0], x)
    values = [
        dequantize(c.view(torch.float8_e4m3fn), s)[:, PLACE]
        for c, s in ((codes, scales), (their_codes, their_scales))
    ]
    assert torch.equal(*values), "one of them is another number"


@pytest.mark.parametrize(
    ("mode", "difference"),
    [
        # Down: the exponent of 448 is 8, its mantissa 1.75; what lies above that saturates.
        pytest.param("FLOOR", lambda mantissa: -(mantissa > 96).int(), id="floor"),
        # Up to a power of two: also what would have fitted.
        pytest.param("CEIL", lambda mantissa: ((mantissa > 0) & (mantissa <= 96)).int(), id="ceil"),
        # To nearest: amax is rounded to the 3 bits of an element first, so 1.9375 and more goes up.
        pytest.param("EVEN", lambda mantissa: -((mantissa > 96) & (mantissa < 120)).int(), id="even"),
    ],
)
def test_the_other_modes_differ_by_the_mantissa_of_amax_alone(
    torchao: Any, mode: str, difference: Any
) -> None:
    """Guards: a page that says which amax differ, of 32385 between the clamped ends."""
    amax = bf16_patterns()
    exponent, mantissa = exponents(amax)
    inner = (exponent > 8) & (exponent < 255) & (amax > 0)
    x = one_in_a_block(amax[inner])
    found = theirs(torchao, x, mode)[1].int() - ours(x)[1].int()
    assert torch.equal(found[:, 0], difference(mantissa[inner]))


def test_the_floor_rule_of_the_measurements_is_theirs(torchao: Any) -> None:
    """Guards: a comparison with another rule than the one it names."""
    for x in (goldens(), one_in_a_block(bf16_patterns()), random_fp32()):
        x = x[finite(x)]
        codes, scales = floor.quantize(x)
        their_codes, their_scales = theirs(torchao, x, "FLOOR")
        assert_same_bytes(scales, their_scales, x)
        # Byte 0 stands for 2^-127, which their division takes for 2^-126.
        normal = scales[:, 0] > 0
        assert_same_bytes(codes.view(torch.uint8)[normal], their_codes[normal], x[normal])


def test_infinities(torchao: Any) -> None:
    """Both give the block scale byte 254. Theirs keeps the sign and scales what is beside it; FlashInfer's
    kernel, and so ours, makes +448 of either and zeros of the rest. A server answers that row with NaN."""
    x = goldens()
    x = x[x.isinf().any(-1) & ~x.isnan().any(-1)]
    assert len(x) >= 20
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(torchao, x, "RCEIL")
    assert set(scales.flatten().tolist()) == set(their_scales.flatten().tolist()) == {254}
    expected = torch.where(x.isinf(), 0x7E, (x.view(torch.int16) >> 8) & 0x80).to(torch.uint8)
    assert_same_bytes(codes, expected, x)
    scaled = (x.double() * 2.0**-127).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert_same_bytes(their_codes, scaled.view(torch.uint8), x)


def test_nans(torchao: Any) -> None:
    """Theirs makes NaN of the block, by scale byte 255. Ours leaves NaN out of amax, as the kernel does."""
    x = goldens()
    x = x[x.isnan().any(-1)]
    assert len(x) >= 20
    (codes, scales), (their_codes, their_scales) = ours(x), theirs(torchao, x, "RCEIL")
    assert set(their_scales.flatten().tolist()) == {255}
    assert bool(((their_codes & 0x7F) == 0x7F).all())
    assert not bool((scales == 255).any())
    assert set(codes[x.isnan()].tolist()) == {0x7E}


def test_the_numbers_of_every_code_under_every_scale(torchao: Any) -> None:
    """Guards: bytes that agree and stand for different numbers. In BF16, which has them all but for the last
    scale, whose larger numbers are beyond it in both."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    found = dequantize(codes, scales)
    wanted = torchao.to_dtype(codes, scales, torch.float8_e4m3fn, BLOCK, torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(nan=0.0), wanted.nan_to_num(nan=0.0))
