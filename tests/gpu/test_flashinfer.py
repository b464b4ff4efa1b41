"""FlashInfer's own functions on a GPU, to the byte: its quantizers, its shuffles, its tuner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends import flashinfer_package
from gemmwire_service.backends.flashinfer_quantizer import QUANTIZER
from gemmwire_service.backends.flashinfer_tuning import FlashInferTuner
from gemmwire_service.mxfp8.format import BLOCK, quantize
from gemmwire_service.mxfp8.layout import ScaleLayout, scale_size, shuffle_rows, shuffle_scales, swizzle
from kernels import check_exact, exact_layer
from on_gpu import REHEARSAL, available, goldens
from oracle import spread

LAYOUTS = (ScaleLayout.R8C4, ScaleLayout.R128C4)


@pytest.fixture
def flashinfer() -> Any:
    try:
        return flashinfer_package.load()
    except Exception as error:
        pytest.skip(f"needs FlashInfer: {type(error).__name__}: {error}")


@pytest.fixture
def quantizers(device: torch.device) -> tuple[str, ...]:
    reason = flashinfer_package.unavailable("trtllm", device)
    if reason is not None:
        pytest.skip(f"FlashInfer's quantizers: {reason}")
    return QUANTIZER.names()


def golden_rows(k: int) -> Tensor:
    """Every golden block, in rows of K."""
    x = goldens()[0].flatten()
    return x[: len(x) // k * k].view(-1, k)


def assert_same_bytes(x: Tensor, layout: ScaleLayout, quantizer: str) -> None:
    m, k = x.shape
    codes, scales = QUANTIZER.quantize(x, layout, quantizer)
    assert quantizer in QUANTIZER.names(), f"{quantizer} failed, and another was used in its place"
    ours, linear = quantize(x)
    assert scales.shape == (scale_size(layout, m, k // BLOCK),)
    wrong = (codes.view(torch.uint8) != ours.view(torch.uint8)).nonzero()
    assert not len(wrong), f"{len(wrong)} codes, first {wrong[0].tolist()}"
    wrong = (scales.view(torch.uint8) != swizzle(linear, layout)).nonzero()
    assert not len(wrong), f"{len(wrong)} scale bytes, first at {wrong[0].tolist()}"


@pytest.mark.sm100
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("k", [32, 256, 1536], ids="k{}".format)
def test_its_quantizers_give_our_bytes_for_every_golden_block(
    device: torch.device, quantizers: tuple[str, ...], layout: ScaleLayout, k: int
) -> None:
    """Guards: a release of FlashInfer whose numerics moved; NaN and Inf included."""
    for quantizer in quantizers:
        assert_same_bytes(golden_rows(k).to(device), layout, quantizer)


@pytest.mark.sm100
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.value)
@pytest.mark.parametrize("m", [1, 7, 8, 9, 127, 128, 129, 300], ids="m{}".format)
def test_its_layouts_are_ours_with_zeros_in_the_padding(
    device: torch.device, quantizers: tuple[str, ...], layout: ScaleLayout, m: int
) -> None:
    """Guards: a scale in another place, a padding row that keeps what the memory held."""
    for k in (256, 8192):
        torch.full((1 << 24,), 0xA7, dtype=torch.uint8, device=device)  # what freed memory then holds
        for quantizer in quantizers:
            assert_same_bytes(spread(m, k, seed=m).to(torch.bfloat16).to(device), layout, quantizer)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(128, 256), (384, 512), (2176, 1536)], ids=str)
def test_our_shuffles_are_its_shuffles(device: torch.device, flashinfer: Any, n: int, k: int) -> None:
    """Guards: a weight in another order than the kernel reads. These run on any CUDA GPU."""
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator).to(device)
    scales = torch.randint(0, 255, (n, k // BLOCK), dtype=torch.uint8, generator=generator).to(device)
    assert torch.equal(shuffle_rows(codes), flashinfer.shuffle_matrix_a(codes, 128))
    assert torch.equal(shuffle_scales(scales), flashinfer.shuffle_matrix_sf_a(scales, 128).view(-1))


@pytest.mark.sm100
def test_what_is_tuned_serves_and_the_rest_raises(device: torch.device, tmp_path: Path) -> None:
    """Guards: a shape that runs an arbitrary kernel because its tuning is kept under another name."""
    if REHEARSAL:
        pytest.skip("the simulator has no tuner")
    backend = available("flashinfer_trtllm", device)
    layer, other = (exact_layer(backend, n, 512, bias=False, device=device) for n in (256, 384))
    tuner = FlashInferTuner(tmp_path, (1, 8))
    with tuner.tuning():
        check_exact(layer, 8, layer.plans(8), device)
    with tuner.serving():
        for m in (1, 8):
            check_exact(layer, m, layer.plans(m), device)
    assert list(tmp_path.rglob("entries/*.json"))
    with pytest.raises(RuntimeError, match="strict replay miss"), tuner.serving():
        check_exact(other, 8, other.plans(8)[:1], device)
