"""Checkpoints of other libraries as a server loads them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device
from gemmwire_service.errors import CheckpointError, SettingsError
from gemmwire_service.layer import Layer
from gemmwire_service.loader import Loader
from gemmwire_service.loading import choose_device
from gemmwire_service.mxfp8.layout import ScaleLayout, swizzle
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.settings import Settings
from serving import settings

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"


def load(options: Settings) -> list[Layer]:
    device = Device(torch.device("cpu"), Ladder.up_to(8), lambda message: None)
    return list(Loader(options, "emulation").load_all(device))


def test_unquantized_layers_are_served_when_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = (f"m={FIXTURES / 'modelopt'}",)
    assert {layer.source_dtype for layer in load(settings(model=model))} == {"MXFP8"}
    assert "skipped 1 (is BF16 in a checkpoint of MXFP8, excluded by 'lm_head'" in caplog.text

    served = {layer.name: layer for layer in load(settings(model=model, allow_unquantized=True))}
    assert (len(served), served["m.lm_head"].source_dtype) == (8, "BF16")
    assert "1 weights that it leaves unquantized are quantized: lm_head" in caplog.text


def test_a_model_is_held_against_its_reference(tmp_path: Path) -> None:
    """Guards: swizzled scales served, though the unquantized model was there to tell."""
    wide: dict[str, Tensor] = {"w.weight": torch.randn(128, 128, generator=torch.Generator().manual_seed(1))}
    (tmp_path / "reference").mkdir()
    save_file(wide, tmp_path / "reference" / "model.safetensors")
    quantized = tmp_path / "quantized"
    shutil.copytree(tmp_path / "reference", quantized)

    from gemmwire_service.quantize.command import main

    assert main([str(tmp_path / "reference"), str(quantized), "--force"]) == 0
    options = settings(model=(f"m={quantized}",), reference=(f"m={tmp_path / 'reference'}",))
    assert [layer.name for layer in load(options)] == ["m.w"]

    tensors = load_file(quantized / "model.safetensors")
    flat = swizzle(tensors["w.weight_scale"] + torch.arange(128)[:, None] % 2, ScaleLayout.R128C4)
    tensors["w.weight_scale"] = flat.view(128, 4).to(torch.uint8)
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(CheckpointError, match="layer 'w' is no quantization of its namesake"):
        load(options)


def test_a_second_start_takes_what_the_first_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(model=(f"m={FIXTURES / 'bf16'}",), weight_cache=str(tmp_path / "cache"))
    assert len(load(options)) == 8
    assert len(list((tmp_path / "cache" / "weights").iterdir())) == 8

    monkeypatch.setattr(MxWeight, "from_float", lambda *given: pytest.fail("quantized again"))
    assert {layer.source_dtype for layer in load(options)} == {"BF16"}


@pytest.mark.parametrize(
    ("name", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_a_device_has_its_number(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: --device cuda, which torch.cuda.set_device does not take."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(choose_device(name)) == device


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingsError, match="there are 2 CUDA devices here, cuda:0 to cuda:1"):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match="there is one CUDA device here, cuda:0; choose"):
        choose_device("cuda:1")
