"""What config.json declares: layouts that are transposed, quantizations that are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmwire_service.checkpoint.hf_config import CONV1D_MODULES, Declared, read_declared
from gemmwire_service.errors import CheckpointError

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {}}
SGLANG = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}

FOREIGN: dict[str, tuple[Any, str]] = {
    "fp8": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "'quant_method': 'fp8'"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "'quant_method': 'gptq', 'bits': 4"),
    "awq": ({"quant_method": "awq", "bits": 4}, "'quant_method': 'awq'"),
    "bitsandbytes": ({"load_in_4bit": True}, "'load_in_4bit': True"),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'quant_algo': 'NVFP4'"),
    "modelopt-mixed": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
    "compressed-fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "'float-quantized'",
    ),
    "unknown-keys": ({"some": "thing"}, "'some': 'thing'"),
    "a-list": (["fp8"], "['fp8']"),
    "a-string": ("mxfp8", "'mxfp8'"),
}


def write(folder: Path, name: str = "config.json", **config: Any) -> None:
    (folder / name).write_text(json.dumps(config))


def test_nothing_is_declared_without_a_config(tmp_path: Path) -> None:
    assert read_declared(tmp_path) == Declared()


@pytest.mark.parametrize("model_type", sorted(CONV1D_MODULES))
def test_model_types_that_store_conv1d(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, model_type=model_type)
    assert {"c_attn", "c_proj", "c_fc"} <= read_declared(tmp_path).transposed


def test_other_model_types_transpose_nothing(tmp_path: Path) -> None:
    """Guards: a rule by module name alone: GPT-BigCode has a c_attn that is an nn.Linear."""
    write(tmp_path, model_type="gpt_bigcode")
    assert read_declared(tmp_path) == Declared("gpt_bigcode", frozenset())


@pytest.mark.parametrize("quantization", [None, {}, MODELOPT, COMPRESSED, SGLANG], ids=str)
def test_mxfp8_and_no_quantization_pass(quantization: Any, tmp_path: Path) -> None:
    write(tmp_path, model_type="llama", quantization_config=quantization)
    assert read_declared(tmp_path).model_type == "llama"


@pytest.mark.parametrize(("quantization", "says"), FOREIGN.values(), ids=FOREIGN)
def test_another_quantization_is_refused(quantization: Any, says: str, tmp_path: Path) -> None:
    """Guards: numbers that need a scale of their own format, served without it."""
    write(tmp_path, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=r"config\.json: declares the quantization .* MXFP8") as error:
        read_declared(tmp_path)
    assert says in str(error.value)


@pytest.mark.parametrize("algorithm", ["MXFP8", None], ids=str)
def test_modelopts_own_file_may_say_mxfp8(algorithm: str | None, tmp_path: Path) -> None:
    write(tmp_path, "hf_quant_config.json", quantization={"quant_algo": algorithm, "group_size": 32})
    assert read_declared(tmp_path).scheme.name == ("ModelOpt MXFP8" if algorithm else "no declaration")


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W4A16_AWQ", "MIXED_PRECISION"])
def test_modelopts_own_file_may_not_say_another(algorithm: str, tmp_path: Path) -> None:
    write(tmp_path, "hf_quant_config.json", quantization={"quant_algo": algorithm})
    with pytest.raises(CheckpointError, match=rf"hf_quant_config\.json: declares .*{algorithm}"):
        read_declared(tmp_path)


def test_infinity_in_a_config_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Guards: strictness of the container's header applied to a file that is not ours. Mamba's has it."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert read_declared(tmp_path).model_type == "mamba2"


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"], ids=ascii)
def test_a_config_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    """Guards: a declaration that is ignored because it is damaged."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read_declared(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(Path.mkdir, "not a regular file", id="folder"),
        pytest.param(os.mkfifo, "not a regular file", id="pipe"),
        pytest.param(lambda path: path.symlink_to("gone"), "no such file", id="broken-link"),
        pytest.param(lambda path: path.symlink_to(path.name), "cannot be opened", id="link-to-itself"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "not a regular file", id="device"),
    ],
)
def test_a_config_that_is_no_file_is_refused(
    name: str, make: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    """Guards: a declaration that is not there to be read taken for none, and a pipe that is waited for."""
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"/{name}: {says}"):
        read_declared(tmp_path)
