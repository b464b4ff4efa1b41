"""A trial of one backend: a number where it works, a reason where it does not, never an exception."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import Plan
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.doctor.trial import FAILS, PASSED_OVER, WORKS, Trial, try_backend, try_isolated
from scripted_backend import Fault, ScriptedBackend, no_fault
from sm100 import simulate

CPU = torch.device("cpu")


def tried(monkeypatch: pytest.MonkeyPatch, fault: Fault = no_fault) -> Trial:
    monkeypatch.setitem(BACKENDS, "scripted", lambda: ScriptedBackend(fault=fault))
    return try_backend("scripted", CPU)


@pytest.mark.parametrize("name", ["emulation", "scripted"])
def test_a_backend_that_works_has_an_error_and_times(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(BACKENDS, "scripted", ScriptedBackend)
    result = try_backend(name, CPU)
    assert (result.status, result.reason) == (WORKS, None)
    assert list(result.microseconds) == ["1", "7", "9"]
    assert all(time > 0 for time in result.microseconds.values())
    assert result.error is not None
    assert 0 <= result.error < 2.0**-8


def test_requests_are_staged_as_the_server_stages_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a trial of full buckets only, where the server runs 7 rows in a bucket of 8."""
    backend = ScriptedBackend()
    monkeypatch.setitem(BACKENDS, "scripted", lambda: backend)
    try_backend("scripted", CPU)
    last = backend.xs[-1]
    assert last.shape == (16, 384)
    assert last[:9].any(dim=1).all()
    assert not last[9:].any()


def wrong(plan: Plan, out: Tensor) -> None:
    out[0] *= 1.5


def wrong_once_warm(plan: Plan, out: Tensor) -> None:
    """The requests of a trial hold no NaN; its warm-up does."""
    if not out.isnan().any() and plan.bucket == 8:
        out[3] = 0.0


def raises(plan: Plan, out: Tensor) -> None:
    raise RuntimeError("no kernel image\nis available")


def writes_nothing(plan: Plan, out: Tensor) -> None:
    out[:4] = torch.nan


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (wrong, "row 0 is"),
        (raises, "RuntimeError: no kernel image is available"),
        (wrong_once_warm, "off emulation"),
        (writes_nothing, "off emulation"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_backend_that_is_wrong_fails_with_the_reason_on_one_line(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, why: str
) -> None:
    """Guards: a check that says "works" because nothing was raised."""
    result = tried(monkeypatch, fault)
    assert result.status == FAILS
    assert why in (result.reason or "")
    assert "\n" not in (result.reason or "")


def test_emulation_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: emulation as its own judge."""
    forward = Emulation.forward

    def off(self: object, x: Tensor, weight: object, plan: Plan, out: Tensor) -> None:
        forward(self, x, weight, plan, out)  # type: ignore[arg-type]
        out[:, 5] *= 3

    monkeypatch.setattr(Emulation, "forward", off)
    result = try_backend("emulation", CPU)
    assert (result.status, "off float64" in (result.reason or "")) == (FAILS, True)


def test_a_backend_that_cannot_here_is_passed_over_with_its_reason() -> None:
    result = try_backend("cublas", CPU)
    assert result.status == PASSED_OVER
    assert "compute capability 10.0" in (result.reason or "")


@pytest.mark.parametrize("name", ["flashinfer_trtllm", "cublas"])
def test_a_kernel_is_tried_as_the_server_would_run_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards: a trial that a real kernel cannot pass: its padding, plans, or FlashInfer's tuner left out."""
    simulate(monkeypatch)
    result = try_backend(name, CPU)
    assert (result.status, result.reason, list(result.microseconds)) == (WORKS, None, ["1", "7", "9"])


def test_a_backend_that_cannot_even_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> ScriptedBackend:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setitem(BACKENDS, "scripted", broken)
    assert try_backend("scripted", CPU) == Trial(
        "scripted", FAILS, "OSError: libcuda.so.1: cannot open shared object file"
    )


# In a process of its own.


def test_a_process_of_its_own_answers_the_same() -> None:
    result = try_isolated("emulation", CPU)
    assert (result.name, result.status, result.reason) == ("emulation", WORKS, None)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param("echo bad kernel >&2; kill -SEGV $$", "SIGSEGV: bad kernel", id="signal"),
        pytest.param("echo 'x: y' >&2; exit 3", "status 3: x: y", id="status"),
        pytest.param("true", "status 0: it said nothing", id="silent"),
        pytest.param("echo '{\"name\": 1'", "status 0", id="half-an-answer"),
        pytest.param("exec sleep 30", "not done after 1 s", id="hangs"),
    ],
)
def test_a_process_that_ends_badly_is_a_failed_trial(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, why: str
) -> None:
    """Guards: a check that dies of, or waits for ever for, the kernel it was to tell about."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    result = try_isolated("emulation", CPU, timeout=1)
    assert result.status == FAILS
    assert why in (result.reason or "")
