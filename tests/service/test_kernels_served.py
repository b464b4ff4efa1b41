"""A server whose layers run on a kernel backend: what the engine stages for it, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashinfer_sim
from gemmwire_service import warmup
from http_calls import call, infer, message
from oracle import assert_rows_close, reference, spread
from serving import Served, serving, settings
from sm100 import simulate

BACKENDS = ("flashinfer_trtllm", "flashinfer_cutedsl", "flashinfer_cutlass", "cublas")
M = (1, 7, 8, 9, 128, 129, 300)
LAYERS = ("plain", "ragged", "one", "wide")


@pytest.fixture(autouse=True)
def _few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator takes its time, and repeats itself by construction."""
    monkeypatch.setattr(warmup, "REPETITIONS", 1)


@pytest.fixture(params=BACKENDS)
def served(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> Iterator[Served]:
    simulate(monkeypatch)
    with serving(settings(model=(f"m={checkpoint}",), backend=request.param, max_bucket=256)) as served:
        yield served


@pytest.fixture
def trtllm(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Iterator[Served]:
    simulate(monkeypatch)
    with serving(settings(model=(f"m={checkpoint}",), backend="flashinfer_trtllm", max_bucket=256)) as served:
        yield served


@pytest.mark.parametrize("layer", LAYERS)
def test_answers_of_a_kernel(served: Served, weights: dict[str, Tensor], layer: str) -> None:
    """Guards: a k_pad or n_pad of the backend that the engine does not stage or slice by."""
    w, bias = weights[f"{layer}.weight"], weights.get(f"{layer}.bias")
    for m in M:
        x = spread(m, w.shape[1], seed=m).to(torch.bfloat16)
        reply = infer(served, f"m.{layer}", *message(x))
        assert reply.status == 200, reply.body
        assert_rows_close(reply.tensor, reference(x, w, bias), tolerance=2.0**-7)


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33)], ids=str)
def test_no_rows_reach_no_kernel(trtllm: Served, shape: tuple[int, ...]) -> None:
    """Guards: a grid of no blocks, whose launch error FlashInfer drops."""
    before = len(flashinfer_sim.MACHINE.calls)
    reply = infer(trtllm, "m.ragged", *message(torch.empty(shape, dtype=torch.bfloat16)))
    assert reply.status == 200
    assert reply.json["outputs"][0]["shape"] == [*shape[:-1], 130]
    assert len(flashinfer_sim.MACHINE.calls) == before


def test_rows_beyond_m_and_columns_beyond_k_are_zero(trtllm: Served, weights: dict[str, Tensor]) -> None:
    """Guards: what an earlier request left in the staging, which a kernel may read across rows."""
    k = weights["ragged.weight"].shape[1]
    infer(trtllm, "m.ragged", *message(torch.full((128, k), 7.0, dtype=torch.bfloat16)))
    flashinfer_sim.MACHINE.calls.clear()
    infer(trtllm, "m.ragged", *message(torch.ones(5, k, dtype=torch.bfloat16)))
    (x,) = (call["input"] for name, call in flashinfer_sim.MACHINE.calls if name == "mxfp8_quantize")
    assert x.shape == (8, 256)
    assert torch.equal(x[:5, :k], torch.ones(5, k, dtype=torch.bfloat16))
    assert not x[5:].any()
    assert not x[:, k:].any()


def test_a_row_that_is_not_finite_is_nan_and_the_others_keep_their_bits(trtllm: Served) -> None:
    x = spread(7, 33, seed=1).to(torch.bfloat16)
    clean = infer(trtllm, "m.ragged", *message(x)).tensor
    x[3, 5] = float("inf")
    y = infer(trtllm, "m.ragged", *message(x)).tensor
    assert y[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(y[others], clean[others])


def test_the_layer_says_what_was_passed_over(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    """Guards: a 12.0, where only some of FlashInfer's backends run, that gets one of the others."""
    simulate(monkeypatch, capability=(12, 0))
    with serving(settings(model=(f"m={checkpoint}",), max_bucket=256)) as served:
        config = call(served, "GET", "/v2/models/m.plain/config").body.decode()
    assert "flashinfer_cutlass" in config
    assert "FlashInfer 0.7.4 has no trtllm kernels for compute capability 12.0" in config
