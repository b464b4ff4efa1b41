"""The two quantizers of FlashInfer: which is called, and what happens without the experimental one."""

from __future__ import annotations

import logging

import pytest
import torch

import flashinfer_sim
from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import Plan
from gemmwire_service.backends.flashinfer_quantizer import CUDA, CUTE_DSL, Quantizer
from gemmwire_service.mxfp8.layout import ScaleLayout
from kernels import check_exact, exact_layer
from sm100 import simulate

X = torch.ones(9, 256, dtype=torch.bfloat16)


def backends_called() -> list[object]:
    return [call["backend"] for name, call in flashinfer_sim.MACHINE.calls if name == "mxfp8_quantize"]


@pytest.mark.parametrize("name", [CUDA, CUTE_DSL])
def test_the_one_that_is_named_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards: FlashInfer's "auto", which another release may resolve in another way."""
    simulate(monkeypatch)
    Quantizer().quantize(X, ScaleLayout.R8C4, name)
    assert backends_called() == [name]


def test_a_cute_dsl_that_is_missing_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a silent other path, and a line in the log for each layer and bucket."""
    simulate(monkeypatch, cute_dsl=False)
    quantizer = Quantizer()
    with caplog.at_level(logging.WARNING, "gemmwire.flashinfer"):
        for _ in range(3):
            assert quantizer.names() == (CUDA,)
            quantizer.quantize(X, ScaleLayout.R128C4, CUTE_DSL)
    assert backends_called() == [CUDA] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "FlashInfer's cuda quantizer is used in place of its cute-dsl one: nvid"
    )


def test_a_cute_dsl_that_fails_is_said_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a compile error at each forward of each bucket."""
    simulate(monkeypatch, cute_dsl_breaks="no such arch: sm_100a")
    quantizer = Quantizer()
    assert quantizer.names() == (CUDA, CUTE_DSL)
    for _ in range(3):
        codes, scales = quantizer.quantize(X, ScaleLayout.R128C4, CUTE_DSL)
    assert backends_called() == [CUTE_DSL, CUDA, CUDA, CUDA]
    assert (codes.shape, scales.shape) == ((9, 256), (1024,))
    assert quantizer.names() == (CUDA,)
    (record,) = caplog.records
    assert "RuntimeError: no such arch: sm_100a" in record.getMessage()


def test_a_cuda_quantizer_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a failure that is hidden because there is another quantizer."""
    simulate(monkeypatch)
    with pytest.raises(NotImplementedError):
        Quantizer().quantize(X.float(), ScaleLayout.R8C4, CUDA)


def test_a_layer_runs_on_where_cute_dsl_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, cute_dsl_breaks="no such arch: sm_100a")
    layer = exact_layer(BACKENDS["flashinfer_trtllm"](), 130, 341, bias=True)
    check_exact(layer, 9, layer.plans(9))
    assert {plan.quantizer for plan in layer.plans(9)} == {CUDA}


def test_a_plan_for_each_layout_and_quantizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: candidates that are never measured, and a first guess that is the worst one."""
    simulate(monkeypatch)
    plans = BACKENDS["flashinfer_trtllm"]().plans
    assert plans(8) == (
        Plan(8, "8x4", "cuda"),
        Plan(8, "8x4", "cute-dsl"),
        Plan(8, "128x4", "cuda"),
        Plan(8, "128x4", "cute-dsl"),
    )
    assert [plans(bucket)[0].layout for bucket in (1, 128, 256, 4096)] == ["8x4", "8x4", "128x4", "128x4"]
    for name in ("flashinfer_cutedsl", "flashinfer_cutlass"):
        assert BACKENDS[name]().plans(8) == (Plan(8, "128x4", "cuda"), Plan(8, "128x4", "cute-dsl"))
    assert BACKENDS["flashinfer_batch_invariant"]().plans(8) == (Plan(8, "128x4", "cuda"),)
    assert BACKENDS["cublas"]().plans(8) == (Plan(8, "128x4", "torch"),)
    assert BACKENDS["emulation"]().plans(8) == (Plan(8),)
