"""Warm-up and its timer on a GPU, and the check that a user runs first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from gemmwire_service.backends import PRIORITY
from gemmwire_service.backends.base import Backend
from gemmwire_service.backends.cuda_device import capability, dotted
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.plans import Environment, PlanKey, PlanStore
from gemmwire_service.timer import REPLAYS, WARM_UPS, CudaTimer
from gemmwire_service.tuning import tuner_for
from gemmwire_service.warmup import warm_up
from on_gpu import sized
from oracle import spread
from source_tree import ROOT

BUCKETS = (1, 8, sized(256, 16))


class NoTimer:
    def microseconds(self, run: Callable[[], None]) -> float:
        pytest.fail("measured again what is stored")


def test_every_bucket_works_and_is_measured_once(
    backend: Backend, device: torch.device, tmp_path: Path
) -> None:
    """Guards: a bucket that falls to another backend on the machine this one is for."""
    weight = MxWeight.from_float(spread(130, 384), torch.ones(130))
    prepared = backend.prepare(weight, device)
    tuner = tuner_for(backend.name, tmp_path, BUCKETS)
    store = PlanStore(tmp_path, Environment.of(device))
    warmed = warm_up(backend, prepared, weight, device, BUCKETS, store, tuner=tuner)
    assert warmed.failures == ()
    assert sorted(warmed.plans) == list(BUCKETS)
    for bucket in BUCKETS:
        measured = store.get(PlanKey(backend.name, prepared.n_pad, prepared.k_pad, bucket))
        assert measured is not None
        assert (measured.plan, measured.microseconds > 0) == (warmed.plans[bucket], True)
    again = PlanStore(tmp_path, Environment.of(device))
    assert warmed == warm_up(backend, prepared, weight, device, BUCKETS, again, tuner=tuner, timer=NoTimer())


@pytest.mark.gpu
def test_a_run_is_captured_once_and_replayed(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Guards: a time of the host's calls, where the server replays a graph."""
    x, out = torch.ones(64, 64, device=device), torch.empty(64, 64, device=device)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        torch.mm(x, x, out=out)

    assert CudaTimer(device).microseconds(run) > 0
    assert calls == WARM_UPS + 1
    assert caplog.text == ""


@pytest.mark.gpu
def test_a_run_that_cannot_be_captured_is_timed_by_calls(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a backend lost, or a broken stream, because one of its operations waits for the GPU."""
    x = torch.ones(64, device=device)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        x.sum().item()

    timer = CudaTimer(device)
    assert timer.microseconds(run) > 0
    assert calls == WARM_UPS + 1 + 1 + REPLAYS
    assert "not captured" in caplog.text
    assert timer.microseconds(partial(torch.mul, x, 1.0, out=x)) > 0  # type: ignore[arg-type]


@pytest.mark.gpu
def test_the_check_names_each_backend_and_finds_one_that_works(device: torch.device) -> None:
    """Guards: the report that a user attaches, on the machines it is for."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("client", "service"))
    command = [sys.executable, "-m", "gemmwire_service", "check", "--json", "--device", str(device)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [backend["name"] for backend in found["backends"]] == list(PRIORITY)
    on = capability(device)
    assert on is not None
    assert dotted(on) in found["facts"][f"gpu{device.index}"]["value"]
    by_name = {backend["name"]: backend for backend in found["backends"]}
    assert by_name["emulation"]["status"] == "works"
    if on < (10, 0):
        assert found["chosen"] == "emulation"
        for name in PRIORITY[:-1]:
            assert f"compute capability {dotted(on)}" in by_name[name]["reason"]
