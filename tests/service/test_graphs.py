"""Graphs without a GPU: which buckets get one, what is held against the eager run, what is said aloud."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.base import Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.buckets import Ladder
from gemmwire_service.capture import Run
from gemmwire_service.control import _config
from gemmwire_service.graphs import Graphs, fitting
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.program import StaticX
from on_device import served_layer
from oracle import spread
from scripted_cuda import ScriptedRecorder, ScriptedStreams, machine

CPU = torch.device("cpu")
LADDER = Ladder((1, 2, 4, 8))
N, K = 34, 96


def layer(backend: Emulation | None = None, ladder: Ladder = LADDER) -> Layer:
    return served_layer("a", backend or Emulation(), MxWeight.from_float(spread(N, K)), CPU, ladder)


def graphs(**recorder: object) -> tuple[Graphs, ScriptedRecorder]:
    found = machine(LADDER, **recorder).graphs  # type: ignore[arg-type]
    assert isinstance(found.recorder, ScriptedRecorder)
    return found, found.recorder


def eager_of(layer: Layer) -> dict[int, str]:
    assert layer.graphs is not None
    return {each.bucket: each.reason for each in layer.graphs.eager}


# Which buckets.


@pytest.mark.parametrize(
    ("needs", "held", "each", "left", "expected"),
    [
        pytest.param({1: 0, 8: 0}, 0, 10, 20, {1, 8}, id="all"),
        pytest.param({1: 0, 8: 0}, 0, 10, 19, {1}, id="one-graph-too-many"),
        pytest.param({1: 5, 8: 90}, 0, 1, 50, {1}, id="the-large-one-is-left-out"),
        pytest.param({1: 5, 8: 90}, 90, 1, 2, {1, 8}, id="the-pool-is-shared"),
        pytest.param({1: 5, 8: 90}, 80, 1, 12, {1, 8}, id="the-pool-grows-by-the-rest"),
        pytest.param({1: 0}, 0, 1, 0, set(), id="none"),
    ],
)
def test_the_small_buckets_come_first(
    needs: dict[int, int], held: int, each: int, left: int, expected: set[int]
) -> None:
    """Guards: a budget that is spent on the buckets which gain least."""
    assert fitting(needs, held, each, left) == expected


def test_every_bucket_is_captured_the_largest_first_after_an_eager_run() -> None:
    """Guards: a pool of many small pieces; a first call, which compiles or allocates, within a capture."""
    backend = Noting()
    found, recorder = graphs()
    served = layer(backend)
    served.programs = found.capture(served)
    assert recorder.recorded == 4
    assert backend.first == [8, 4, 2, 1]
    assert eager_of(served) == {}
    assert all(served.has_graph(bucket) for bucket in LADDER.buckets)


class Noting(Emulation):
    def __init__(self) -> None:
        super().__init__()
        self.first: list[int] = []

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if plan.bucket not in self.first:
            self.first.append(plan.bucket)
        super().forward(x, weight, plan, out)


def test_over_the_budget_there_are_fewer_graphs_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: memory that runs out once the weights fit; and a limit that nobody hears of."""
    found, recorder = graphs(budget=250_000, bytes_each=100_000)
    first, second = layer(), layer()
    first.programs = found.capture(first)
    # What one graph takes is known only once there is one.
    assert recorder.taken <= 250_000 + 100_000
    second.programs = found.capture(second)
    assert recorder.taken <= 250_000 + 100_000
    assert found.used == recorder.taken
    assert not any(second.has_graph(bucket) for bucket in LADDER.buckets)
    assert all("--graph-budget-bytes" in reason for reason in eager_of(second).values())
    assert "layer a, M=1, 2, 4, 8: runs without a CUDA graph" in caplog.text
    config = _config(second, "cuda:0", LADDER.buckets)
    assert [each.bucket for each in config.eager] == [1, 2, 4, 8]
    assert not any(plan.graph for plan in config.plans)


def test_what_a_capture_allocates_counts_once_for_all_graphs() -> None:
    found, _ = graphs(budget=2_000_000, bytes_transient=900_000)
    first, second = layer(), layer()
    first.programs, second.programs = found.capture(first), found.capture(second)
    assert eager_of(first) == eager_of(second) == {}


def test_a_layer_that_leaves_gives_its_share_of_the_budget_back() -> None:
    """Guards: a server that loads and unloads until no layer has graphs any more."""
    found, recorder = graphs(budget=1_000_000, bytes_each=100_000, bytes_transient=10_000)
    for number in range(1, 9):
        served = layer()
        served.programs = found.capture(served)
        assert eager_of(served) == {}, f"layer {number}"
        assert found.used == 400_000
        found.release(served)
        recorder.taken -= 400_000
        assert (found.used, served.programs) == (0, {})
    kept, leaving = layer(), layer()
    kept.programs, leaving.programs = found.capture(kept), found.capture(leaving)
    found.release(leaving)
    assert found.used == 400_000
    found.release(layer())  # one that was never captured
    assert found.used == 400_000


def test_a_budget_of_nothing_switches_them_off() -> None:
    found, recorder = graphs(budget=0)
    served = layer()
    served.programs = found.capture(served)
    assert recorder.recorded == 0
    assert set(eager_of(served)) == set(LADDER.buckets)


# What is held against the eager run.


def stale(number: int, run: Run) -> None:
    """Guards: a graph that was captured in a mode in which nothing is captured."""


def rerun_then(change: object) -> object:
    def fault(number: int, run: Run) -> None:
        run()
        change()  # type: ignore[operator]

    return fault


def test_a_graph_that_writes_nothing_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = graphs(fault=stale)
    served = layer()
    served.programs = found.capture(served)
    assert not any(served.has_graph(bucket) for bucket in LADDER.buckets)
    assert "differ, the first at [0, 0]" in eager_of(served)[8]
    assert "M=1, 2, 4, 8" in caplog.text or "M=8" in caplog.text
    served.programs[8].x.rows(8).fill_(1.0)
    served.programs[8].run()
    assert served.programs[8].y.isfinite().all()


def test_a_graph_that_fails_now_and_then_is_not_served() -> None:
    """Guards: corruption at one of twenty replays."""
    runs = 0

    def fault(number: int, run: Run) -> None:
        nonlocal runs
        run()
        runs += 1
        if runs == 13:
            served.routes  # noqa: B018
            target[3] += 1.0

    found, _ = graphs(fault=fault)
    served = layer(ladder=LADDER)
    target = found.statics.y(N)
    served.programs = found.capture(served)
    assert set(eager_of(served)) == {8}
    assert "replay 13" in eager_of(served)[8]


def test_rows_below_m_that_reach_those_above_are_seen() -> None:
    """Guards: scales of padding rows that a kernel reads for real ones."""

    def fault(number: int, run: Run) -> None:
        run()
        x, y = found.statics.x(K).rows(8), found.statics.y(N)[: 8 * N].view(8, N)
        if number == 1 and not x[7].isfinite().all():
            y[0, 5] += 1.0

    found, _ = graphs(fault=fault)
    served = layer()
    served.programs = found.capture(served)
    assert set(eager_of(served)) == {8}
    assert "[0, 5]" in eager_of(served)[8]


@pytest.mark.parametrize("number", [1, 3])
def test_a_capture_that_raises_costs_one_bucket(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Guards: a compilation or an allocation of another thread that ends the start of the server."""

    def refuse(at: int) -> Exception | None:
        return RuntimeError("operation not permitted when stream is capturing") if at == number else None

    found, _ = graphs(refuse=refuse)
    served = layer()
    served.programs = found.capture(served)
    failed = {1: 8, 3: 2}[number]
    assert set(eager_of(served)) == {failed}
    assert f"M={failed}: runs without a CUDA graph: RuntimeError: operation not permitted" in caplog.text


# The static x.


def test_rows_between_m_and_the_bucket_are_always_zero() -> None:
    """Guards: rows of an earlier, larger request below those of this one."""
    streams = ScriptedStreams()
    x = StaticX(torch.zeros(64 * 32, dtype=torch.bfloat16), 32)
    ladder, generator = Ladder.up_to(64), random.Random(1)
    for _ in range(500):
        m = generator.randint(1, 64)
        source = torch.full((m, 32), float("nan") if m % 3 else 3.0, dtype=torch.bfloat16)
        bucket = generator.choice([each for each in ladder.buckets if each >= m])
        x.load(streams, source.data_ptr(), m, bucket)
        rows = x.rows(bucket).view(torch.int16)
        assert torch.equal(rows[:m], source.view(torch.int16))
        assert not rows[m:].any()
        if generator.random() < 0.05:
            x.rows(64).fill_(7.0)
            x.spoil()
