"""What is passed to FlashInfer: everything by name, so that it can be held to the signatures of a release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashinfer_sim
from gemmwire_service.backends import BACKENDS
from kernels import exact_layer
from sm100 import simulate

NAMES = {
    "flashinfer_trtllm": "trtllm",
    "flashinfer_cutedsl": "cute-dsl",
    "flashinfer_cutlass": "cutlass",
    "flashinfer_batch_invariant": "auto",
}


def calls(monkeypatch: pytest.MonkeyPatch, name: str, m: int = 9) -> list[tuple[str, dict[str, Any]]]:
    """What a forward of each plan calls."""
    machine = simulate(monkeypatch)
    layer = exact_layer(BACKENDS[name](), 130, 341, bias=True)
    machine.calls.clear()
    for plan in layer.plans(m):
        layer.forward(torch.ones(m, 341, dtype=torch.bfloat16), plan)
    return machine.calls


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_is_one_quantize_and_one_multiply(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards: work that is done again at each forward, above all on the weight."""
    simulate(monkeypatch)
    plans = len(BACKENDS[name]().plans(9))
    assert [call for call, _ in calls(monkeypatch, name)] == ["mxfp8_quantize", "mm_mxfp8"] * plans


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards: a position that another release gives to another argument."""
    assert [key for _, call in calls(monkeypatch, name) for key in call if key.startswith("#")] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_backend_is_never_left_to_flashinfer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards: "auto", which knows nothing of shuffled rows. The batch-invariant mode alone demands it."""
    for call, arguments in calls(monkeypatch, name):
        if call == "mm_mxfp8":
            assert arguments["backend"] == NAMES[name]
            assert arguments["batch_invariant"] is (name == "flashinfer_batch_invariant")
        else:
            assert arguments["backend"] in ("cuda", "cute-dsl")


def test_an_answer_in_another_tensor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a release that takes `out` and leaves it as it was."""
    simulate(monkeypatch)
    layer = exact_layer(BACKENDS["flashinfer_cutlass"](), 130, 341, bias=False)
    real = flashinfer_sim.mm_mxfp8

    def elsewhere(**call: Any) -> Tensor:
        answer: Tensor = real(**{**call, "out": None})
        return answer

    monkeypatch.setattr(flashinfer_sim, "mm_mxfp8", elsewhere)
    with pytest.raises(RuntimeError, match="mm_mxfp8 with backend cutlass did not write to `out`"):
        layer.forward(torch.ones(1, 341, dtype=torch.bfloat16), layer.plans(1)[0])
