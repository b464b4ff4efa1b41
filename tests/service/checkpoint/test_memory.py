"""How much memory reading a checkpoint takes, measured on a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LAYERS = 8
MIB = 1 << 20
SLACK = 6 * MIB  # the pieces that are worked on, and what else a process does
SHAPES = {"BF16": (1024, 2048), "F32": (1024, 1024), "MXFP8": (2048, 2048)}  # 4 MiB each
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

# Prints by how many bytes the peak is above what was there before. The small checkpoint is read first, so
# that what torch sets up on first use is not counted.
MEASURE = """
import sys
from pathlib import Path
from gemmwire_service.checkpoint import open_checkpoint

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

def read(path):
    checkpoint = open_checkpoint(Path(path))
    return [checkpoint.read(name) for name in checkpoint.names()]

small = read(sys.argv[1])
before = status("VmRSS")
layers = read(sys.argv[2])
print(status("VmHWM") - before)
"""


def tensors(kind: str, shrink: int = 1) -> dict[str, torch.Tensor]:
    n, k = SHAPES[kind][0] // shrink, SHAPES[kind][1]
    found = {}
    for i in range(LAYERS):
        if kind == "MXFP8":
            found[f"{i}.weight"] = torch.full((n, k), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            found[f"{i}.weight_scale"] = torch.full((n, k // 32), 127, dtype=torch.uint8)
        else:
            found[f"{i}.weight"] = torch.ones(n, k, dtype=DTYPES[kind])
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to measure memory")
@pytest.mark.parametrize("kind", SHAPES)
def test_the_peak_is_the_result_and_two_layers(kind: str, tmp_path: Path) -> None:
    """Guards: the whole file in memory beside the result, which is 32 MiB here and 200 GB elsewhere."""
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    save_file(tensors(kind, shrink=64), small)
    save_file(tensors(kind), large)

    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    # glibc keeps freed blocks of up to 32 MiB for the next call, unless it is told where its own memory ends.
    fixed = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **fixed}, timeout=100)
    assert run.returncode == 0, run.stderr

    n, k = SHAPES[kind]
    result = LAYERS * (n * k + n * k // 32)
    layer = large.stat().st_size // LAYERS
    assert int(run.stdout) <= result + 2 * layer + SLACK, (
        f"{int(run.stdout) / MIB:.1f} MiB, of which {result / MIB:.1f} stay"
    )
