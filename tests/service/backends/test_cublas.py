"""torch's block-scaled scaled_mm: who has it, and that the simulator is called as torch would be."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import scaled_mm_sim
from gemmwire_service.backends.cublas import SYMBOLS, Cublas
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import CPU, exact_layer
from sm100 import simulate

REAL = F.scaled_mm


def test_the_simulator_has_torchs_signature() -> None:
    """Guards: a call that the simulator takes and torch does not."""

    def shape(function: Any) -> list[tuple[str, object, object]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(scaled_mm_sim.scaled_mm) == shape(REAL)


def test_every_argument_is_named_and_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    seen: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        assert not args
        seen.append(kwargs)
        return scaled_mm_sim.scaled_mm(**kwargs)

    monkeypatch.setattr(F, "scaled_mm", recorded)
    exact_layer(Cublas(), 130, 341, bias=True).forward(
        torch.ones(3, 341, dtype=torch.bfloat16), Cublas().plans(4)[0]
    )
    (call,) = seen
    assert set(call) <= set(inspect.signature(REAL).parameters)
    assert call.get("bias") is None, "scaled_mm would round the bias to BF16"


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch, symbol: str) -> None:
    simulate(monkeypatch)
    monkeypatch.delattr(F, symbol)
    assert str(Cublas().unavailable(CPU)).startswith(f"torch {torch.__version__} lacks {symbol}: ")


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0)], ids=str)
def test_it_runs_from_10_on_without_flashinfer(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Guards: a machine without FlashInfer that falls through to emulation."""
    simulate(monkeypatch, capability, packages={})
    monkeypatch.delattr("flashinfer_sim.mm_mxfp8")
    assert Cublas().unavailable(CPU) is None
    layer = exact_layer(Cublas(), 3, 33, bias=False)
    layer.forward(torch.ones(1, 33, dtype=torch.bfloat16), layer.plans(1)[0])


def test_an_amd_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: torch's ROCm build, which calls its devices cuda and lays scales out in another way."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert str(Cublas().unavailable(torch.device("cuda"))).endswith("or higher, not an AMD GPU")


def test_the_weight_is_copied() -> None:
    """Guards: a refit that writes into the checkpoint's tensors."""
    weight = MxWeight.from_float(torch.ones(128, 128))
    prepared = Cublas().prepare(weight, CPU)
    prepared.codes.zero_()
    assert weight.codes.float().sum() > 0
