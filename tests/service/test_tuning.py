"""The choice of a plan: the fastest of those that run, are right and repeat themselves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import Plan
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.plans import Environment, Measured, PlanKey, PlanStore
from gemmwire_service.tuning import TUNERS, NoTuner, Verify, choose, refuse_lost, tuner_for
from oracle import spread
from scripted_backend import Fault, ScriptedBackend, ScriptedTimer, no_fault

CPU = torch.device("cpu")
LAYOUTS = ("8x4", "128x4", "slow")


def accept(plan: Plan) -> None:
    pass


def chosen(
    *times: float, fault: Fault = no_fault, verify: Verify = accept, store: PlanStore | None = None
) -> str:
    """The layout that is chosen at bucket 8 where the candidates take these times."""
    backend = ScriptedBackend(LAYOUTS, fault)
    weight = backend.prepare(MxWeight.from_float(spread(5, 33)), CPU)
    kept = store or PlanStore(None, Environment(*"gctufbw"))
    return choose(backend, weight, 8, kept, ScriptedTimer(*times), device=CPU, verify=verify).layout


def raising(layout: str, message: str = "no kernel image") -> Fault:
    def fault(plan: Plan, out: Tensor) -> None:
        if plan.layout == layout:
            raise RuntimeError(message)

    return fault


def unstable(layout: str, forward: int) -> Fault:
    """One element of that forward is off by one bit."""
    count = 0

    def fault(plan: Plan, out: Tensor) -> None:
        nonlocal count
        if plan.layout == layout:
            if count == forward:
                out.view(torch.int16)[3, 2] ^= 1
            count += 1

    return fault


@pytest.mark.parametrize(
    ("times", "layout"), [((3, 1, 2), "128x4"), ((1, 2, 3), "8x4"), ((3, 2, 1), "slow")], ids=str
)
def test_the_fastest_wins(times: tuple[float, ...], layout: str) -> None:
    assert chosen(*times) == layout


def test_equals_go_to_the_backends_first_guess() -> None:
    """Guards: a choice that differs from start to start without a reason."""
    assert chosen(1, 1, 1) == "8x4"


def test_the_choice_is_stored_with_its_time() -> None:
    store = PlanStore(None, Environment(*"gctufbw"))
    chosen(3, 1.5, 2, store=store)
    assert store.get(PlanKey("scripted", 5, 64, 8)) == Measured(Plan(8, "128x4"), 1.5)


def test_a_candidate_that_raises_is_dropped_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: one missing kernel that costs the layer its backend, and one that is passed over in silence."""
    assert chosen(3, 2, fault=raising("128x4")) == "slow"
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "128x4" in said
    assert "RuntimeError: no kernel image" in said


@pytest.mark.parametrize("forward", [1, 13, 20], ids="forward{}".format)
def test_a_candidate_that_is_not_stable_to_the_bit_is_dropped(
    caplog: pytest.LogCaptureFixture, forward: int
) -> None:
    """Guards: a tactic that corrupts one replay in twenty."""
    assert chosen(3, 2, fault=unstable("128x4", forward)) == "slow"
    assert f"other bits at repetition {forward} of 20: 1 of 40 elements" in caplog.text


def test_a_candidate_that_is_wrong_is_dropped_however_fast() -> None:
    """Guards: the fastest kernel being the one that leaves work out."""

    def verify(plan: Plan) -> None:
        if plan.layout == "128x4":
            raise BackendError("row 0 is inf off emulation")

    assert chosen(3, 2, verify=verify) == "slow"


def test_a_candidate_that_writes_nothing_at_some_repetition_is_dropped() -> None:
    """Guards: an output that keeps what the forward before left in it, and so seems stable."""
    count = 0

    def fault(plan: Plan, out: Tensor) -> None:
        nonlocal count
        if plan.layout == "128x4":
            count += 1
            if count > 1:
                out.copy_(backend.before)

    backend = ScriptedBackend(LAYOUTS, fault)
    weight = backend.prepare(MxWeight.from_float(spread(5, 33)), CPU)
    store = PlanStore(None, Environment(*"gctufbw"))
    assert choose(backend, weight, 8, store, ScriptedTimer(3, 2), device=CPU).layout == "slow"


def test_nothing_left_names_every_candidate_with_its_reason() -> None:
    with pytest.raises(BackendError) as raised:
        chosen(fault=raising("8x4", "first"), verify=lambda plan: raising(plan.layout)(plan, torch.empty(0)))
    text = str(raised.value)
    assert "bucket 8 (N=5, K=33)" in text
    for layout in LAYOUTS:
        assert f"layout='{layout}'" in text
    assert text.count("no kernel image") == 3


def test_a_backend_without_candidates_is_an_error() -> None:
    backend = ScriptedBackend(())
    weight = backend.prepare(MxWeight.from_float(spread(5, 33)), CPU)
    with pytest.raises(BackendError, match="it offers none"):
        choose(backend, weight, 8, PlanStore(None, Environment(*"gctufbw")), ScriptedTimer(), device=CPU)


def test_every_candidate_gets_the_same_rows() -> None:
    """Guards: a comparison of different work, columns beyond K that are not zero."""
    backend = ScriptedBackend(LAYOUTS)
    weight = backend.prepare(MxWeight.from_float(spread(5, 33)), CPU)
    store = PlanStore(None, Environment(*"gctufbw"))
    choose(backend, weight, 8, store, ScriptedTimer(1, 2, 3), device=CPU)
    assert all(torch.equal(x, backend.xs[0]) for x in backend.xs)
    assert backend.xs[0].shape == (8, 64)
    assert not backend.xs[0][:, 33:].any()


def test_a_lost_device_is_no_bad_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a poisoned CUDA context that makes each next backend look broken, down to emulation."""

    def lost(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(BackendError, match=r"cuda:0 is lost .*illegal memory access.*after ValueError: odd"):
        refuse_lost(torch.device("cuda:0"), ValueError("odd"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    refuse_lost(torch.device("cuda:0"), ValueError("odd"))


def test_tuners_are_those_of_known_backends() -> None:
    assert set(TUNERS) == {name for name in BACKENDS if name.startswith("flashinfer_")}
    assert isinstance(tuner_for("emulation", None, (1, 8)), NoTuner)
    assert not isinstance(tuner_for("flashinfer_trtllm", Path("cache"), (1, 8)), NoTuner)
