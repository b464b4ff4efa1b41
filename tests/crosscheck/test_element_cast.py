"""The cast of an element, by two libraries: every BF16 number under several scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gemmwire.mxfp8
from edge_blocks import bf16_patterns
from gemmwire_service.mxfp8.format import BLOCK, quantize

ml_dtypes = pytest.importorskip("ml_dtypes")

SCALES = (1, 2, 9, 64, 119, 126, 127, 128, 135, 200, 246)
LARGEST = 448.0


def under(scale: int) -> Tensor:
    """BF16 [B, 32] whose blocks have this scale, by their first element; behind it, all numbers that fit."""
    largest = torch.tensor(LARGEST * 2.0 ** (scale - 127), dtype=torch.bfloat16)
    patterns = bf16_patterns()
    fitting = patterns[patterns.abs() <= largest]
    filled = torch.nn.functional.pad(fitting, (0, -len(fitting) % (BLOCK - 1))).view(-1, BLOCK - 1)
    return torch.cat([largest.expand(len(filled), 1), filled], -1)


def by_ml_dtypes(values: Any) -> Any:
    """FP32 or float64 array -> the bytes of the nearest E4M3."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@pytest.mark.parametrize("scale", SCALES)
def test_our_codes_are_the_nearest_by_ml_dtypes(scale: int) -> None:
    """Guards: a rounding that is wrong for some number: a tie, a subnormal, a double rounding."""
    x = under(scale)
    assert x.numel() > 2 * 128 * (scale + 7)
    codes, scales = quantize(x)
    assert set(scales.flatten().tolist()) == {scale}
    scaled = np.ldexp(x.double().numpy(), 127 - scale)
    expected = by_ml_dtypes(scaled.astype(np.float32))
    wrong = np.argwhere(codes.view(torch.uint8).numpy() != expected)
    assert len(wrong) == 0, (len(wrong), x[tuple(wrong[0])].item(), expected[tuple(wrong[0])])


@pytest.mark.parametrize("scale", SCALES)
def test_the_client_s_codes_are_too(scale: int) -> None:
    """Guards: a second quantizer, in NumPy, that only ours vouches for."""
    x = under(scale)
    codes, scales = gemmwire.mxfp8.quantize(x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    scaled = np.ldexp(x.double().numpy(), 127 - scale)
    assert set(scales.flatten().tolist()) == {scale}
    np.testing.assert_array_equal(codes, by_ml_dtypes(scaled.astype(np.float32)))


def test_torch_s_cast_is_ml_dtypes_s_up_to_where_they_overflow() -> None:
    """Guards: a cast of another rounding below quantize(), which clamps before it for what is above.

    464 lies between 448 and the 480 that E4M3 has not: up to it both give 448, above it torch still does,
    and ml_dtypes gives NaN.
    """
    x = bf16_patterns()
    codes = x.float().to(torch.float8_e4m3fn).view(torch.uint8)
    theirs = torch.from_numpy(by_ml_dtypes(x.float().numpy()))
    fits, nan = x.abs() <= 464, x.isnan()
    assert torch.equal(codes[fits], theirs[fits])
    above = ~fits & ~nan
    assert set((codes[above & x.isfinite()] & 0x7F).tolist()) == {0x7E}
    assert set((theirs[above] & 0x7F).tolist()) == {0x7F}
    assert set((codes[nan] & 0x7F).tolist()) == set((theirs[nan] & 0x7F).tolist()) == {0x7F}
