"""A quantized checkpoint held against the model that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.spot_check import SpotChecked
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.layout import ScaleLayout, swizzle
from gemmwire_service.mxfp8.weight import MxWeight

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


def saved(folder: Path, tensors: dict[str, Tensor], declared: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if declared:
        (folder / "config.json").write_text(json.dumps({"quantization_config": declared}))
    return folder


def weight(n: int, k: int, spread: int = 4) -> Tensor:
    """BF16 whose blocks have magnitudes of 2^0 to 2^spread, as real weights do."""
    generator = torch.Generator().manual_seed(n * k)
    exponents = torch.randint(0, spread + 1, (n, -(-k // 32), 1), generator=generator)
    values = torch.randn(n, -(-k // 32), 32, generator=generator) * torch.exp2(exponents)
    return values.reshape(n, -1)[:, :k].bfloat16()


def checked(tmp_path: Path, stored: Tensor, scales: Tensor, original: Tensor, name: str = "m") -> SpotChecked:
    tensors = {"m.weight": stored, "m.weight_scale": scales.contiguous()}
    made = saved(tmp_path / "made", tensors, MODELOPT)
    reference = saved(tmp_path / "reference", {f"{name}.weight": original})
    return SpotChecked(open_checkpoint(made), SafetensorsCheckpoint(reference))


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors", "vendor", "fp8-blocks-128", "deepseek"])
def test_what_other_libraries_made_passes(name: str) -> None:
    """Guards: a check that knows our rounding of scales alone, or no coarser block."""
    made = SpotChecked(open_checkpoint(FIXTURES / name), SafetensorsCheckpoint(FIXTURES / "bf16"))
    assert [made.read(layer).name for layer in made.names()] == list(made.names())
    assert made.notes[-1] == f"7 of 7 layers are held against {FIXTURES / 'bf16'}"


@pytest.mark.parametrize(("n", "k"), [(128, 128), (512, 256), (1, 32), (5, 40), (300, 96)], ids=str)
def test_a_quantization_of_the_reference_passes(n: int, k: int, tmp_path: Path) -> None:
    original = weight(n, k)
    made = MxWeight.from_float(original)
    layer = checked(tmp_path, made.codes[:, :k].contiguous(), made.scales, original).read("m")
    assert torch.equal(layer.weight.scales, made.scales)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (512, 256)], ids=str)
@pytest.mark.parametrize("spread", [1, 12])
def test_swizzled_scales_of_the_right_shape_are_caught_and_named(
    n: int, k: int, spread: int, tmp_path: Path
) -> None:
    """Guards: a layer of nonsense that every check of names, dtypes, shapes and values lets pass."""
    original = weight(n, k, spread)
    made = MxWeight.from_float(original)
    scales = swizzle(made.scales, ScaleLayout.R128C4).view(n, k // 32)
    compared = checked(tmp_path, made.codes, scales, original)
    with pytest.raises(CheckpointError, match=r"layer 'm' is no quantization.*they are swizzled in the file"):
        compared.read("m")


def test_one_wrong_row_in_fifty_is_caught(tmp_path: Path) -> None:
    original = weight(100, 64)
    made = MxWeight.from_float(original)
    made.scales[::50] += 1
    with pytest.raises(CheckpointError, match=r": 4 of 200 blocks of 32"):
        checked(tmp_path, made.codes, made.scales, original).read("m")


def test_the_rows_that_are_compared_lie_all_over_the_layer(tmp_path: Path) -> None:
    """Guards: a look at the first rows alone, which a shard of another model does not hold."""
    original = weight(1000, 64)
    made = MxWeight.from_float(original)
    made.scales[900:] += 1
    with pytest.raises(CheckpointError, match=r": 26 of 256 blocks of 32"):
        checked(tmp_path, made.codes, made.scales, original).read("m")


def test_another_model_is_caught(tmp_path: Path) -> None:
    made = MxWeight.from_float(weight(128, 128))
    other = weight(128, 128).roll(1, 0)
    with pytest.raises(CheckpointError, match="it is of another model, or its scales are in another order"):
        checked(tmp_path, made.codes, made.scales, other).read("m")


@pytest.mark.parametrize(
    ("original", "name"),
    [
        pytest.param(weight(128, 128), "other", id="name"),
        pytest.param(weight(128, 96), "m", id="shape"),
    ],
)
def test_a_reference_without_a_common_layer_is_refused(original: Tensor, name: str, tmp_path: Path) -> None:
    """Guards: a check that was asked for and compares nothing."""
    made = MxWeight.from_float(weight(128, 128))
    with pytest.raises(CheckpointError, match="has no unquantized layer of the name and shape"):
        checked(tmp_path, made.codes, made.scales, original, name)


def test_a_quantized_reference_is_no_reference() -> None:
    with pytest.raises(CheckpointError, match="has no unquantized layer"):
        SpotChecked(open_checkpoint(FIXTURES / "modelopt"), SafetensorsCheckpoint(FIXTURES / "vendor"))


def test_layers_without_a_namesake_are_counted(tmp_path: Path) -> None:
    original = weight(32, 64)
    made = MxWeight.from_float(original)
    tensors = {f"{name}.weight": made.codes.clone() for name in "ab"}
    scales = {f"{name}.weight_scale": made.scales.clone() for name in "ab"}
    folder = saved(tmp_path / "made", {**tensors, **scales}, MODELOPT)
    reference = saved(tmp_path / "reference", {"a.weight": original})
    compared = SpotChecked(open_checkpoint(folder), SafetensorsCheckpoint(reference))
    assert compared.notes[-1].startswith("1 of 2 layers are held against")
    assert [compared.read(name).name for name in compared.names()] == ["a", "b"]
