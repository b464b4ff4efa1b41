"""Layers out of safetensors: the bits that are served, and the values that are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import dequantize
from gemmwire_service.mxfp8.weight import MxWeight
from http_calls import raw
from oracle import spread
from safetensors_bytes import container

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def saved(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """`model.safetensors` in `folder`, and a config.json if there is anything to declare."""
    path = folder / "model.safetensors"
    save_file(tensors, path)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return path


def assert_same_weight(got: MxWeight, expected: MxWeight) -> None:
    assert (got.n, got.k) == (expected.n, expected.k)
    assert torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(got.scales, expected.scales)
    assert (got.bias is None) == (expected.bias is None)
    if got.bias is not None and expected.bias is not None:
        assert torch.equal(got.bias, expected.bias)


def mxfp8(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Every code that is a number and every scale byte that is one, in turn."""
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    blocks = -(-k // 32)
    return (
        torch.tensor([codes[i % 254] for i in range(n * k)], dtype=torch.uint8)
        .view(n, k)
        .view(torch.float8_e4m3fn),
        torch.tensor([i % 255 for i in range(n * blocks)], dtype=torch.uint8).view(n, blocks),
    )


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("k", [1, 32, 33, 96])
def test_a_float_weight_is_quantized_from_its_own_dtype(source: str, k: int, tmp_path: Path) -> None:
    """Guards: FP32 rounded to BF16 on the way; a K that is not a multiple of a block."""
    weight = (
        (spread(5, k) * 1.01).clamp(-60000, 60000).to(FLOATS[source])
    )  # beyond BF16's 8 bits where FP32 is
    bias = spread(1, 5, seed=1)[0].to(FLOATS[source])
    checkpoint = SafetensorsCheckpoint(saved(tmp_path, {"a.b.weight": weight, "a.b.bias": bias}))

    layer = checkpoint.read("a.b")
    assert checkpoint.names() == ("a.b",)
    assert checkpoint.spec("a.b") == (5, k, True)
    assert (layer.name, layer.source_dtype) == ("a.b", source)
    assert_same_weight(layer.weight, MxWeight.from_float(weight, bias))
    assert layer.weight.bias is not None
    assert layer.weight.bias.dtype == torch.float32


@pytest.mark.parametrize("source", FLOATS)
def test_the_quantized_weight_is_the_stored_one(source: str, tmp_path: Path) -> None:
    """Guards: rows or blocks in another order, which the comparison with our own quantizer would not see.

    Each element is within 2^-4 of itself, or within half of E4M3's smallest step under its block's scale.
    """
    weight = spread(64, 96, seed=3).clamp(-60000, 60000).to(FLOATS[source])
    read = SafetensorsCheckpoint(saved(tmp_path, {"m.weight": weight})).read("m").weight

    stored, served = weight.double(), dequantize(read.codes, read.scales, torch.float64)
    step = torch.ldexp(
        torch.ones(64, 3, dtype=torch.float64), read.scales.int() - 127 - 10
    ).repeat_interleave(32, 1)
    error = (served - stored).abs()
    assert (error <= torch.maximum(stored.abs() * 2.0**-4, step)).all()


@pytest.mark.parametrize("scale", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("k", [32, 50, 96])
def test_an_mxfp8_weight_is_taken_byte_for_byte(scale: str, k: int, tmp_path: Path) -> None:
    """Guards: scale bytes converted as numbers, codes that pass through a float. Two names of one thing."""
    codes, scales = mxfp8(11, k)
    path = tmp_path / "model.safetensors"
    entries = {
        "m.weight": ("F8_E4M3", codes.shape, raw(codes)),
        "m.weight_scale": (scale, scales.shape, raw(scales)),
        "m.bias": ("BF16", [11], raw(spread(1, 11)[0].bfloat16())),
    }
    path.write_bytes(container(entries))

    checkpoint = SafetensorsCheckpoint(path)
    layer = checkpoint.read("m")
    assert checkpoint.spec("m") == (11, k, True)
    assert (layer.source_dtype, layer.probe, layer.weight.k) == ("MXFP8", None, k)
    assert torch.equal(layer.weight.codes.view(torch.uint8)[:, :k], codes.view(torch.uint8))
    assert not layer.weight.codes.view(torch.uint8)[:, k:].any(), "the padding of K is not zero"
    assert torch.equal(layer.weight.scales, scales)
    assert layer.weight.bias is not None
    assert torch.equal(layer.weight.bias, spread(1, 11)[0])


@pytest.mark.parametrize(
    ("code", "scale", "says"),
    [
        pytest.param(0x7F, 127, "codes[1, 40] is 0x7f", id="nan-code"),
        pytest.param(0xFF, 127, "codes[1, 40] is 0xff", id="negative-nan-code"),
        pytest.param(0x38, 255, "scales[1, 1] is 0xff", id="nan-scale"),
    ],
)
def test_mxfp8_that_is_not_a_number_is_refused(code: int, scale: int, says: str, tmp_path: Path) -> None:
    """Guards: a NaN that reaches every answer of its output feature."""
    codes, scales = mxfp8(2, 64)
    codes.view(torch.uint8)[1, 40], scales[1, 1] = code, scale
    path = saved(tmp_path, {"m.weight": codes, "m.weight_scale": scales})

    with pytest.raises(CheckpointError, match=r"tensors 'm\.weight', 'm\.weight_scale'") as error:
        SafetensorsCheckpoint(path).read("m")
    assert says in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_float_weight_that_is_not_finite_is_refused(source: str, value: str, tmp_path: Path) -> None:
    """Guards: NaN quantized to 448. Opening succeeds: values are looked at when the layer is read."""
    weight = torch.ones(3, 40, dtype=FLOATS[source])
    weight[1, 33] = weight[2, 0] = float(value)
    checkpoint = SafetensorsCheckpoint(saved(tmp_path, {"m.weight": weight, "ok.weight": torch.ones(2, 2)}))

    with pytest.raises(CheckpointError) as error:
        checkpoint.read("m")
    assert f"tensor 'm.weight': holds {value} at [1, 33]" in str(error.value)
    assert checkpoint.read("ok").weight.n == 2


@pytest.mark.parametrize("source", FLOATS)
def test_a_bias_that_is_not_finite_is_refused(source: str, tmp_path: Path) -> None:
    bias = torch.zeros(3, dtype=FLOATS[source])
    bias[2] = float("nan")
    checkpoint = SafetensorsCheckpoint(saved(tmp_path, {"m.weight": torch.ones(3, 4), "m.bias": bias}))
    with pytest.raises(CheckpointError, match=r"tensor 'm\.bias': holds nan at \[2\]"):
        checkpoint.read("m")


@pytest.mark.parametrize("by", ["folder", "file"])
def test_a_declared_conv1d_is_transposed(by: str, tmp_path: Path) -> None:
    """Guards: a model that answers differently when its file is named instead of its folder."""
    weight, bias = spread(64, 96), spread(1, 96, seed=2)[0]  # stored [K, N]
    tensors = {"h.0.attn.c_attn.weight": weight, "h.0.attn.c_attn.bias": bias}
    path = saved(tmp_path, tensors, model_type="gpt2")
    checkpoint = SafetensorsCheckpoint(path if by == "file" else tmp_path)

    assert checkpoint.spec("h.0.attn.c_attn") == (96, 64, True)
    assert_same_weight(
        checkpoint.read("h.0.attn.c_attn").weight, MxWeight.from_float(weight.T.contiguous(), bias)
    )
    assert checkpoint.notes == (
        "model_type gpt2: 1 weights (c_attn, c_fc, c_proj, q_attn) are stored [in, out] and transposed",
    )


def test_the_index_of_a_conv1d_weight_is_the_stored_one(tmp_path: Path) -> None:
    """Guards: a position that the user looks up in the file and does not find."""
    weight = torch.ones(4, 9)
    weight[1, 8] = float("inf")
    saved(tmp_path, {"c_fc.weight": weight}, model_type="gpt2")
    with pytest.raises(CheckpointError, match=r"holds inf at \[1, 8\]"):
        SafetensorsCheckpoint(tmp_path).read("c_fc")


def test_another_quantization_is_refused_at_once(tmp_path: Path) -> None:
    saved(tmp_path, {"m.weight": torch.ones(2, 2)}, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="declares the quantization"):
        SafetensorsCheckpoint(tmp_path)


def test_a_layer_may_lie_across_shards(tmp_path: Path) -> None:
    """Guards: scale and bias looked for in the file of the weight."""
    codes, scales = mxfp8(4, 64)
    save_file({"m.weight": codes}, tmp_path / "1.safetensors")
    save_file({"m.weight_scale": scales, "m.bias": torch.arange(4.0)}, tmp_path / "2.safetensors")
    shards = {"m.weight": "1.safetensors", "m.weight_scale": "2.safetensors", "m.bias": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    assert_same_weight(
        SafetensorsCheckpoint(tmp_path).read("m").weight, MxWeight(codes, scales, torch.arange(4.0), 64)
    )


def test_a_checkpoint_without_a_layer_lists_what_it_skipped(tmp_path: Path) -> None:
    """Guards: a server that starts with nothing to serve."""
    path = saved(tmp_path, {"wte.weight": torch.ones(3, 4), "norm.weight": torch.ones(4)})
    with pytest.raises(CheckpointError, match="no linear layer to serve") as error:
        SafetensorsCheckpoint(path)
    assert "Skipped 2: 'norm.weight': is 1-D" in str(error.value)
    assert "'wte.weight': is an embedding table" in str(error.value)


def test_an_empty_container_has_no_layer(tmp_path: Path) -> None:
    path = saved(tmp_path, {})
    with pytest.raises(CheckpointError, match="It holds no tensor at all"):
        SafetensorsCheckpoint(path)


def test_many_skipped_tensors_are_counted(tmp_path: Path) -> None:
    """Guards: an error message of thousands of lines."""
    path = saved(tmp_path, {f"norm.{i}.weight": torch.ones(1) for i in range(500)})
    with pytest.raises(CheckpointError, match="and 490 more"):
        SafetensorsCheckpoint(path)


def test_an_unknown_layer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(saved(tmp_path, {"m.weight": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"no layer 'n'; it has 1: 'm'"):
        checkpoint.read("n")
    with pytest.raises(CheckpointError, match=r"no layer 'n'; it has 1: 'm'"):
        checkpoint.spec("n")
