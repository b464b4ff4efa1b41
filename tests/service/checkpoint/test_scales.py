"""Scales as they are stored, brought to one byte per row and 32 columns; and those that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.layout import ScaleLayout, swizzle

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
BLOCKS = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 64]}


def codes(n: int, k: int) -> Tensor:
    return (torch.arange(n * k) % 127).to(torch.uint8).view(n, k).view(torch.float8_e4m3fn)


def distinct(rows: int, columns: int) -> Tensor:
    return (torch.arange(rows * columns) % 251).to(torch.uint8).view(rows, columns)


def saved(folder: Path, tensors: dict[str, Tensor], declared: dict[str, Any] | None, **metadata: str) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata or None)
    if declared is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": declared}))
    return folder


@pytest.mark.parametrize("shape", [(5, 3), (128, 3), (5, 4), (128, 4)], ids=str)
@pytest.mark.parametrize("fill", [0, 127])
def test_padding_of_a_declared_format_is_cut_off(shape: tuple[int, int], fill: int, tmp_path: Path) -> None:
    scales = distinct(5, 3)
    padded = torch.full(shape, fill, dtype=torch.uint8)
    padded[:5, :3] = scales
    saved(tmp_path, {"m.weight": codes(5, 96), "m.weight_scale": padded}, MODELOPT)
    assert torch.equal(open_checkpoint(tmp_path).read("m").weight.scales, scales)


@pytest.mark.parametrize("place", [(0, 3), (4, 3), (5, 0), (6, 3)], ids=str)
def test_a_scale_where_padding_is_expected_is_no_padding(place: tuple[int, int], tmp_path: Path) -> None:
    """Guards: a look at the rows below, or the columns beside, alone."""
    padded = torch.zeros(7, 4, dtype=torch.uint8)
    padded[:5, :3] = distinct(5, 3)
    padded[place] = 1
    saved(tmp_path, {"m.weight": codes(5, 96), "m.weight_scale": padded}, MODELOPT)
    with pytest.raises(CheckpointError, match="this is no padding but another layout"):
        open_checkpoint(tmp_path).read("m")


def test_padding_that_nothing_declares_is_refused(tmp_path: Path) -> None:
    """Guards: a guess from a shape: a swizzled layout has the same."""
    padded = torch.zeros(128, 4, dtype=torch.uint8)
    saved(tmp_path, {"m.weight": codes(5, 96), "m.weight_scale": padded}, None)
    with pytest.raises(
        CheckpointError, match=r"needs \[5, 3\].* only where a config\.json declares the format"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("n", "k"), [(5, 96), (200, 96), (40, 128)], ids=str)
def test_a_swizzled_layout_is_told_from_padding(n: int, k: int, tmp_path: Path) -> None:
    """Guards: rows read from where other rows' scales are."""
    swizzled = swizzle(distinct(n, k // 32), ScaleLayout.R128C4).view(-1, 4)
    saved(tmp_path, {"m.weight": codes(n, k), "m.weight_scale": swizzled.contiguous()}, MODELOPT)
    with pytest.raises(CheckpointError, match=r"tensor 'm\.weight_scale'.*another layout, such as") as error:
        open_checkpoint(tmp_path).read("m")
    assert error.value.expected == [n, k // 32]


@pytest.mark.parametrize("said", ["tensor", "header"])
def test_a_file_of_comfyui_is_refused_though_its_shapes_are_right(said: str, tmp_path: Path) -> None:
    """Guards: swizzled scales with the shape of linear ones, which no check of shapes can see."""
    tensors = {"m.weight": codes(128, 128), "m.weight_scale": distinct(128, 4)}
    metadata = {}
    if said == "tensor":
        tensors["m.comfy_quant"] = torch.tensor(list(b'{"format": "mxfp8"}'), dtype=torch.uint8)
    else:
        metadata["_quantization_metadata"] = '{"layers": {"m": {"format": "mxfp8"}}}'
    saved(tmp_path, tensors, None, **metadata)
    with pytest.raises(CheckpointError, match=r"tensor 'm\.weight'.*ComfyUI.*128x4"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (33, 96), (1, 40)], ids=str)
def test_the_scale_of_a_block_is_that_of_its_rows_and_columns(
    name: str, dtype: torch.dtype, n: int, k: int, tmp_path: Path
) -> None:
    """Guards: rows and columns exchanged, the last block of a ragged weight, a number taken for a byte."""
    stored = distinct(-(-n // 32), -(-k // 64)) * 7 + 100
    kept = stored.view(torch.float8_e8m0fnu)
    written = {torch.uint8: stored, torch.float8_e8m0fnu: kept, torch.float32: kept.float()}[dtype]
    saved(tmp_path, {"m.weight": codes(n, k), f"m.{name}": written}, BLOCKS)
    scales = open_checkpoint(tmp_path).read("m").weight.scales
    expected = [[int(stored[row // 32, block // 2]) for block in range(-(-k // 32))] for row in range(n)]
    assert scales.tolist() == expected


@pytest.mark.parametrize("block", [[1 << 40, 64], [32, 1 << 40], [1 << 70, 1 << 70]], ids=str)
def test_a_block_may_be_larger_than_the_weight(block: list[int], tmp_path: Path) -> None:
    """Guards: a scale that is repeated for all of a declared block, which no memory holds."""
    stored = distinct(1 if block[0] > 32 else 2, 1 if block[1] > 64 else 2) + 100
    saved(tmp_path, {"m.weight": codes(64, 128), "m.scale": stored}, {**BLOCKS, "weight_block_size": block})
    scales = open_checkpoint(tmp_path).read("m").weight.scales
    rows, columns = stored.shape
    assert scales.tolist() == [
        [int(stored[row * rows // 64, column * columns // 4]) for column in range(4)] for row in range(64)
    ]


@pytest.mark.parametrize("exponent", [-127, -126, 0, 127])
def test_powers_of_two_become_their_exponents(exponent: int, tmp_path: Path) -> None:
    scale = torch.ldexp(torch.ones(1, 1), torch.tensor(exponent))
    saved(tmp_path, {"m.weight": codes(32, 64), "m.scale": scale}, BLOCKS)
    assert open_checkpoint(tmp_path).read("m").weight.scales.unique().tolist() == [exponent + 127]


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 1.0000001, 2.0**-128, float("inf"), float("nan")])
def test_float_scales_that_are_no_powers_of_two_are_refused(value: float, tmp_path: Path) -> None:
    """Guards: a scale rounded to the next power of two, which changes every number under it."""
    scale = torch.tensor([[1.0], [value]])
    saved(tmp_path, {"m.weight": codes(64, 64), "m.scale": scale}, BLOCKS)
    with pytest.raises(CheckpointError, match=r"tensor 'm\.scale': holds .* at \[1, 0\].*powers of two"):
        open_checkpoint(tmp_path).read("m")


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (64, 4), (3, 2)], ids=str)
def test_block_scales_of_another_shape_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    saved(tmp_path, {"m.weight": codes(64, 128), "m.scale": distinct(*shape)}, BLOCKS)
    with pytest.raises(CheckpointError, match=r"needs \[2, 2\], one scale per block of \[32, 64\]"):
        open_checkpoint(tmp_path)


def test_the_nan_of_e8m0_is_refused_after_it_is_repeated(tmp_path: Path) -> None:
    stored = torch.tensor([[127], [255]], dtype=torch.uint8)
    saved(tmp_path, {"m.weight": codes(64, 64), "m.scale": stored}, BLOCKS)
    with pytest.raises(CheckpointError, match=r"'m\.weight', 'm\.scale'.*scales\[32, 0\] is 0xff"):
        open_checkpoint(tmp_path).read("m")


def test_modules_of_another_quantization_are_skipped(tmp_path: Path) -> None:
    """Guards: one FP8 layer, whose scale is a float, that keeps a mixed model from being served."""
    layers = {"a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "FP8"}}
    declared = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    tensors = {
        "a.weight": codes(4, 64),
        "a.weight_scale": distinct(4, 2),
        "b.weight": codes(4, 64),
        "b.weight_scale": torch.ones(1),
    }
    saved(tmp_path, tensors, declared)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == ("a",)
    assert {each.name: each.reason for each in checkpoint.skipped} == {
        "b.weight": "is declared FP8, which is not MXFP8",
        "b.weight_scale": "belongs to 'b.weight', which is not served",
    }


def test_a_quantized_file_without_a_config_says_what_is_assumed(tmp_path: Path) -> None:
    saved(tmp_path, {"m.weight": codes(4, 64), "m.weight_scale": distinct(4, 2)}, None)
    assert "no config.json declares a quantization" in open_checkpoint(tmp_path).notes[0]


def test_float_layers_beside_quantized_ones_are_asked_for_without_a_declaration_too(tmp_path: Path) -> None:
    """Guards: what its maker left unquantized, quantized because the config.json was not copied along."""
    tensors = {"m.weight": codes(4, 64), "m.weight_scale": distinct(4, 2), "head.weight": torch.ones(4, 64)}
    saved(tmp_path, tensors, None)
    assert open_checkpoint(tmp_path).names() == ("m",)
    assert open_checkpoint(tmp_path, allow_unquantized=True).names() == ("head", "m")


def test_a_checkpoint_that_is_declared_quantized_and_is_not_says_how_to_serve_it(tmp_path: Path) -> None:
    saved(tmp_path, {"m.weight": torch.ones(4, 64)}, MODELOPT)
    with pytest.raises(CheckpointError, match=r"no linear layer to serve.*--allow-unquantized"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, allow_unquantized=True).names() == ("m",)
