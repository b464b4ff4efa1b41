"""The quantizer as a torch operator: what a compiler is told is what it gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from gemmwire_service.mxfp8.format import quantize
from gemmwire_service.mxfp8.layout import ScaleLayout, unswizzle
from gemmwire_service.mxfp8.ops import mxfp8_quantize
from oracle import spread

LAYOUTS = [layout.value for layout in ScaleLayout]
SHAPES = [(1, 32), (7, 96), (8, 128), (129, 160), (0, 64)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_operator_is_sound_and_its_fake_has_its_sizes(
    shape: tuple[int, int], layout: str, dtype: torch.dtype
) -> None:
    x = spread(*shape).to(dtype)
    opcheck(mxfp8_quantize, (x, layout))
    fake_codes, fake_scales = torch.ops.gemmwire.mxfp8_quantize(x.to("meta"), layout)
    codes, scales = torch.ops.gemmwire.mxfp8_quantize(x, layout)
    for fake, real in ((fake_codes, codes), (fake_scales, scales)):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_of_quantize(layout: str) -> None:
    x = spread(11, 96)
    codes, scales = mxfp8_quantize(x, layout)
    expected_codes, expected_scales = quantize(x)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(unswizzle(scales, ScaleLayout(layout), 11, 3), expected_scales)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_holds_it_compiles_whole_for_any_m(layout: str) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = mxfp8_quantize(x * 2, layout)
        return codes, scales + 0

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (1, 5, 130):
        x = spread(m, 64)
        for real, expected in zip(compiled(x), model(x), strict=True):
            assert torch.equal(real.view(torch.uint8), expected.view(torch.uint8)), m


@pytest.mark.parametrize(
    ("x", "layout", "named"),
    [
        (torch.ones(2, 33), "linear", "33"),
        (torch.ones(32), "linear", "32"),
        (torch.ones(2, 2, 32), "linear", "flatten"),
        (torch.ones(2, 32, dtype=torch.float64), "linear", "float64"),
        (torch.ones(2, 32), "4x4", "128x4"),
    ],
    ids=["k", "rank-1", "rank-3", "dtype", "layout"],
)
def test_what_it_does_not_take_is_refused_by_name(x: Tensor, layout: str, named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        mxfp8_quantize(x, layout)
