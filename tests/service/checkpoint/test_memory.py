"""How much memory reading a checkpoint takes, measured on a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peak import MIB, STATUS, measurable, measured

LAYERS = 8
SLACK = 6 * MIB  # the pieces that are worked on, and what else a process does
SHAPES = {
    "BF16": (1024, 2048),
    "F32": (1024, 1024),
    "MXFP8": (2048, 2048),
    "BLOCKS": (2048, 2048),
}  # 4 MiB each
BLOCKS = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

# Prints by how many bytes the peak is above what was there before. The small checkpoint is read first, so
# that what torch sets up on first use is not counted.
MEASURE = (
    STATUS
    + """
from pathlib import Path
from gemmwire_service.checkpoint import open_checkpoint

def read(path):
    checkpoint = open_checkpoint(Path(path))
    return [checkpoint.read(name) for name in checkpoint.names()]

small = read(sys.argv[1])
before = status("VmRSS")
layers = read(sys.argv[2])
print(status("VmHWM") - before)
"""
)

QUANTIZE = (
    STATUS
    + """
from gemmwire_service.__main__ import main
assert main(["quantize", sys.argv[1], sys.argv[1] + ".made"]) == 0
before = status("VmRSS")
assert main(["quantize", sys.argv[2], sys.argv[2] + ".made"]) == 0
print(status("VmHWM") - before)
"""
)


START = (
    STATUS
    + """
import torch
from gemmwire_service.backends.storage import nbytes
from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device
from gemmwire_service.loader import Loader
from gemmwire_service.settings import Settings

torch.set_num_threads(1)

def load(path):
    settings = Settings(device="cpu", model=(path,), cache_dir=path.partition("=")[2])
    device = Device(torch.device("cpu"), Ladder((8,)), print)
    return list(Loader(settings, settings.backend).load_all(device))

small = load("m=" + sys.argv[1])
before = status("VmRSS")
layers = load("m=" + sys.argv[2])
forms = sum(nbytes(layer.routes.by_bucket[8].weight) for layer in layers)
print(status("VmHWM") - before - forms)
"""
)


def tensors(kind: str, shrink: int = 1) -> dict[str, torch.Tensor]:
    n, k = SHAPES[kind][0] // shrink, SHAPES[kind][1]
    found = {}
    for i in range(LAYERS):
        if kind == "BLOCKS":
            found[f"{i}.weight"] = torch.full((n, k), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            found[f"{i}.scale"] = torch.full((-(-n // 128), k // 128), 127, dtype=torch.uint8)
        elif kind == "MXFP8":
            found[f"{i}.weight"] = torch.full((n, k), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            found[f"{i}.weight_scale"] = torch.full((n, k // 32), 127, dtype=torch.uint8)
        else:
            found[f"{i}.weight"] = torch.ones(n, k, dtype=DTYPES[kind])
    return found


@measurable
@pytest.mark.parametrize("kind", SHAPES)
def test_the_peak_is_the_result_and_two_layers(kind: str, tmp_path: Path) -> None:
    """Guards: the whole file in memory beside the result, which is 32 MiB here and 200 GB elsewhere."""
    small, large = model(tmp_path / "small", kind, shrink=64), model(tmp_path / "large", kind)
    peak = measured(MEASURE, small, large)
    n, k = SHAPES[kind]
    result = LAYERS * (n * k + n * k // 32)
    layer = (large / "model.safetensors").stat().st_size // LAYERS
    assert peak <= result + 2 * layer + SLACK, f"{peak / MIB:.1f} MiB, of which {result / MIB:.1f} stay"


@measurable
@pytest.mark.parametrize("kind", SHAPES)
def test_a_start_takes_the_layers_and_two_more(kind: str, tmp_path: Path) -> None:
    """Guards: layers that are kept as they were read beside what they are served from."""
    small, large = model(tmp_path / "small", kind, shrink=64), model(tmp_path / "large", kind)
    above = measured(START, small, large)
    n, k = SHAPES[kind]
    layer = max(4 * MIB, 2 * n * k)  # as stored, or in the BF16 of emulation
    piece = 8 * MIB  # of a weight that is dequantized
    assert above <= 2 * layer + piece + SLACK, f"{above / MIB:.1f} MiB beside the layers"


@measurable
@pytest.mark.parametrize("kind", ["BF16", "F32"])
def test_quantizing_a_model_takes_two_layers(kind: str, tmp_path: Path) -> None:
    """Guards: a model that has to fit into memory to be quantized, or a table of it to be copied."""
    small, large = model(tmp_path / "small", kind, shrink=64), model(tmp_path / "large", kind, table=True)
    layer = 4 * MIB
    peak = measured(QUANTIZE, small, large)
    assert peak <= 2 * layer + 8 * MIB + SLACK, f"{peak / MIB:.1f} MiB"


def model(folder: Path, kind: str, shrink: int = 1, table: bool = False) -> Path:
    """`table`: with an embedding of the size of eight layers, which is copied."""
    folder.mkdir()
    embedding = {"wte.weight": torch.zeros(4096, 4096, dtype=torch.bfloat16)} if table else {}
    save_file({**tensors(kind, shrink), **embedding}, folder / "model.safetensors")
    if kind == "BLOCKS":
        (folder / "config.json").write_text(json.dumps({"quantization_config": BLOCKS}))
    return folder
