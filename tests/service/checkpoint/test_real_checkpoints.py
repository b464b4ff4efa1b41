"""What other libraries wrote (tests/fixtures/make_checkpoints.py), read byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.mxfp8.format import dequantize
from gemmwire_service.mxfp8.weight import MxWeight

FOLDER = Path(__file__).parents[2] / "fixtures" / "checkpoints"
LAYERS = tuple(
    f"model.layers.0.{module}_proj"
    for module in (
        "mlp.down",
        "mlp.gate",
        "mlp.up",
        "self_attn.k",
        "self_attn.o",
        "self_attn.q",
        "self_attn.v",
    )
)
# Folder -> the last part of its scales' names, and the rows and columns under one scale.
QUANTIZED = {
    "modelopt": ("weight_scale", 1, 32),
    "compressed-tensors": ("weight_scale", 1, 32),
    "compressed-tensors-a16": ("weight_scale", 1, 32),
    "vendor": ("weight_scale_inv", 1, 32),
    "fp8-blocks-32": ("weight_scale_inv", 32, 32),
    "fp8-blocks-128": ("weight_scale_inv", 128, 128),
    "deepseek": ("scale", 32, 32),
}


def stored(name: str) -> dict[str, Tensor]:
    """Every tensor of a folder, by the library that defines the container."""
    tensors: dict[str, Tensor] = {}
    for file in sorted((FOLDER / name).glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_and_scales_are_taken_byte_for_byte(name: str) -> None:
    """Guards: a scale under another name, of another block or of another dtype, read as something else."""
    scale, rows, columns = QUANTIZED[name]
    checkpoint, tensors = open_checkpoint(FOLDER / name), stored(name)
    assert sorted(checkpoint.names()) == sorted(LAYERS)
    for layer in checkpoint.names():
        read = checkpoint.read(layer)
        codes, scales = bytes_of(tensors[f"{layer}.weight"]), bytes_of(tensors[f"{layer}.{scale}"])
        n, k = codes.shape
        assert (read.source_dtype, read.weight.n, read.weight.k) == ("MXFP8", n, k)
        assert torch.equal(bytes_of(read.weight.codes), codes)
        for row in range(n):
            for block in range(k // 32):
                expected = int(scales[row // rows, block * 32 // columns])
                assert int(read.weight.scales[row, block]) == expected, (layer, row, block)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_numbers_are_those_of_the_unquantized_model(name: str) -> None:
    """Guards: a scale that is taken for its inverse, or for that of another row or block.

    Each element is within 2^-4 of the BF16 weight, or within half of E4M3's smallest step under its scale.
    """
    original, checkpoint = stored("bf16"), open_checkpoint(FOLDER / name)
    for layer in checkpoint.names():
        weight = checkpoint.read(layer).weight
        expected = original[f"{layer}.weight"].double()
        step = torch.ldexp(
            torch.ones(weight.scales.shape, dtype=torch.float64), weight.scales.int() - 127 - 10
        )
        error = (dequantize(weight.codes, weight.scales, torch.float64) - expected).abs()
        assert (error <= torch.maximum(expected.abs() * 2.0**-4, step.repeat_interleave(32, 1))).all(), layer


def test_modelopt_quantizes_to_our_bytes() -> None:
    """Guards: a quantizer that agrees with itself alone. ModelOpt's rule is ours, in its own code."""
    theirs, floats = open_checkpoint(FOLDER / "modelopt"), open_checkpoint(FOLDER / "bf16")
    for layer in theirs.names():
        taken, quantized = theirs.read(layer).weight, floats.read(layer).weight
        assert torch.equal(bytes_of(taken.codes), bytes_of(quantized.codes)), layer
        assert torch.equal(taken.scales, quantized.scales), layer


def test_a_sharded_float_model_is_quantized_from_its_own_weights() -> None:
    checkpoint, tensors = open_checkpoint(FOLDER / "bf16"), stored("bf16")
    assert sorted(checkpoint.names()) == sorted((*LAYERS, "lm_head"))
    for layer in checkpoint.names():
        read, expected = checkpoint.read(layer), MxWeight.from_float(tensors[f"{layer}.weight"])
        assert read.source_dtype == "BF16"
        assert torch.equal(bytes_of(read.weight.codes), bytes_of(expected.codes))
        assert torch.equal(read.weight.scales, expected.scales)


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_it_leaves_unquantized_is_skipped_unless_it_is_asked_for(name: str) -> None:
    """Guards: a layer that its maker kept out of 8 bits, quantized without a word."""
    skipped = {each.name: each.reason for each in open_checkpoint(FOLDER / name).skipped}
    said = "and not in its list of exclusions" if name == "deepseek" else "excluded by 'lm_head'"
    assert skipped["lm_head.weight"] == (
        f"is BF16 in a checkpoint of MXFP8, {said}; "
        "with --allow-unquantized it is quantized at load and served"
    )

    allowed = open_checkpoint(FOLDER / name, allow_unquantized=True)
    assert sorted(allowed.names()) == sorted((*LAYERS, "lm_head"))
    assert "lm_head.weight" not in {each.name for each in allowed.skipped}
    assert "1 weights that it leaves unquantized are quantized: lm_head" in allowed.notes
    read, expected = allowed.read("lm_head"), MxWeight.from_float(stored(name)["lm_head.weight"])
    assert read.source_dtype == "BF16"
    assert torch.equal(bytes_of(read.weight.codes), bytes_of(expected.codes))


def test_weight_only_is_said_to_be_served_with_quantized_activations() -> None:
    notes = {name: open_checkpoint(FOLDER / name).notes for name in QUANTIZED}
    assert [name for name in notes if any("weight-only" in note for note in notes[name])] == [
        "compressed-tensors-a16"
    ]
