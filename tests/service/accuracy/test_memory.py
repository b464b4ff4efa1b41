"""How much memory measuring a model takes, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peak import MIB, STATUS, measurable, measured

LAYERS = 8
N, K = 2048, 2048
PIECES = 24 * MIB  # a few MB each, and what torch's matmuls of float64 take

MEASURE = (
    STATUS
    + """
import torch
from gemmwire_service.__main__ import main
torch.set_num_threads(1)
assert main(["accuracy", sys.argv[1], "--rows", "64"]) == 0
before = status("VmRSS")
assert main(["accuracy", sys.argv[2], "--rows", "64"]) == 0
print(status("VmHWM") - before)
"""
)


@measurable
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_two_layers_whatever_the_size_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    """Guards: a model that has to fit into memory to be measured, or a layer that is all in float64."""
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    save_file({"up.weight": torch.ones(32, K, dtype=dtype)}, small)
    save_file({f"{i}.up.weight": torch.ones(N, K, dtype=dtype) for i in range(LAYERS)}, large)
    layer = N * K * dtype.itemsize
    peak = measured(MEASURE, small, large)
    assert 2 * layer + PIECES < LAYERS * layer, "a whole model would pass"
    assert peak <= 2 * layer + PIECES, f"{peak / MIB:.1f} MiB, with layers of {layer / MIB:.1f}"
