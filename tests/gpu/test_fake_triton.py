"""The fused quantizer on a real GPU: every golden block, any stride, rows that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gemmwire_service.mxfp8.format import BLOCK, dequantize
from oracle import spread

triton = pytest.importorskip("triton", reason="the kernel needs Triton, which comes with torch's CUDA builds")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

GOLDENS = Path(__file__).parents[1] / "goldens" / "mxfp8_quantize_cuda.npz"


def fused(x: Tensor) -> Tensor:
    from gemmwire_service.mxfp8.fake_triton import fake_quantize

    out = torch.full_like(x, 7.0)
    fake_quantize(x, out)
    return out


def plain(x: Tensor) -> Tensor:
    """The same by torch's operators, on the CPU."""
    from gemmwire_service.mxfp8.fake import fake_quantize

    out = torch.empty_like(x, device="cpu")
    fake_quantize(x.cpu(), out)
    return out


def test_every_golden_block_of_finite_numbers() -> None:
    with np.load(GOLDENS) as goldens:
        x = torch.from_numpy(goldens["input_bf16_bits"].view(np.int16)).view(torch.bfloat16)
        codes = torch.from_numpy(goldens["payload_e4m3"]).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(goldens["scale_e8m0"])[:, None]
    expected = dequantize(codes, scales, torch.bfloat16)
    finite = x.isfinite().all(-1) & expected.isfinite().all(-1)
    y = fused(x.cuda()).cpu()
    wrong = (y.view(torch.int16) != expected.view(torch.int16)).any(-1) & finite
    assert not wrong.any(), f"{int(wrong.sum())} blocks differ, the first is {int(wrong.nonzero()[0])}"
    bad = ~x.isfinite()
    assert y[bad].isnan().all(), "an element that is not finite must be NaN, to make its row NaN"


@pytest.mark.parametrize("m", [1, 7, 129])
@pytest.mark.parametrize("k", [32, 96, 1024, 1056, 4096])
def test_any_size_equals_the_operators_bit_for_bit(m: int, k: int) -> None:
    x = spread(m, k).to(torch.bfloat16)
    assert torch.equal(fused(x.cuda()).cpu().view(torch.int16), plain(x).view(torch.int16))


def test_a_strided_destination_keeps_what_lies_beside_it() -> None:
    from gemmwire_service.mxfp8.fake_triton import fake_quantize

    x = spread(5, 64).to(torch.bfloat16).cuda()
    wide = torch.ones(5, 64 + BLOCK, dtype=torch.bfloat16, device="cuda")
    fake_quantize(x, wide[:, :64])
    assert torch.equal(wide[:, :64].cpu(), plain(x))
    assert (wide[:, 64:] == 1).all()


def test_the_service_uses_it_on_a_gpu() -> None:
    from gemmwire_service.mxfp8 import fake

    assert fake._fused() is not None
