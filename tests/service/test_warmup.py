"""Warm-up: a plan for each bucket, each shown to compute what emulation does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemmwire_service import reference, warmup
from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import Plan
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.plans import Environment, Measured, PlanKey, PlanStore
from gemmwire_service.reference import Reference
from gemmwire_service.sample import sample_rows
from gemmwire_service.tuning import REPETITIONS, tuner_for
from gemmwire_service.warmup import WarmUp, warm_up
from oracle import spread
from scripted_backend import Fault, ScriptedBackend, ScriptedTimer
from sm100 import simulate

CPU = torch.device("cpu")
N, K = 130, 384
WEIGHT = MxWeight.from_float(spread(N, K) / 2**14, spread(1, N, seed=1)[0])
KEY = PlanKey("scripted", N, K, 8)


def memory() -> PlanStore:
    return PlanStore(None, Environment(*"gctufbw"))


class FastTimer:
    def microseconds(self, run: Callable[[], None]) -> float:
        return 1.0


def run(backend: ScriptedBackend, *buckets: int, store: PlanStore | None = None, **options: object) -> WarmUp:
    prepared = backend.prepare(WEIGHT, CPU)
    settings = {"timer": FastTimer(), **options}
    return warm_up(backend, prepared, WEIGHT, CPU, buckets, store or memory(), **settings)  # type: ignore[arg-type]


def test_each_bucket_gets_a_plan_the_largest_first() -> None:
    """Guards: memory that the small buckets have fragmented when the largest comes."""
    backend = ScriptedBackend()
    assert run(backend, 1, 8, 64) == WarmUp({64: Plan(64, "8x4"), 8: Plan(8, "8x4"), 1: Plan(1, "8x4")}, ())
    order = list(dict.fromkeys(plan.bucket for plan in backend.forwards))
    assert order == [64, 8, 1]


def test_emulation_on_a_cpu_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a start of seconds on a laptop, where there is nothing to choose or to compare with."""

    def never(*arguments: object) -> None:
        pytest.fail("warm-up of emulation did something")

    monkeypatch.setattr(Emulation, "forward", never)
    monkeypatch.setattr(PlanStore, "get", never)
    monkeypatch.setattr(warmup, "Reference", never)
    backend = Emulation()
    prepared = backend.prepare(WEIGHT, CPU)
    warmed = warm_up(backend, prepared, WEIGHT, CPU, (1, 8), memory())
    assert warmed == WarmUp({1: Plan(1), 8: Plan(8)}, ())


def test_a_stored_plan_is_tried_and_not_measured() -> None:
    backend, store = ScriptedBackend(("8x4", "128x4")), memory()
    store.put(KEY, Measured(Plan(8, "128x4"), 5.0))
    assert run(backend, 8, store=store, timer=ScriptedTimer()).plans == {8: Plan(8, "128x4")}
    assert set(backend.forwards) == {Plan(8, "128x4")}


def test_a_stored_plan_that_the_backend_no_longer_has_is_not_used() -> None:
    """Guards: a layout or quantizer of an edited file that reaches a kernel."""
    store = memory()
    store.put(KEY, Measured(Plan(8, "16x4"), 5.0))
    assert run(ScriptedBackend(("8x4",)), 8, store=store).plans == {8: Plan(8, "8x4")}
    assert store.get(KEY) == Measured(Plan(8, "8x4"), 1.0)


def test_a_stored_plan_that_no_longer_works_is_chosen_anew(caplog: pytest.LogCaptureFixture) -> None:
    def fault(plan: Plan, out: Tensor) -> None:
        if plan.layout == "128x4":
            raise RuntimeError("no cubin")

    store = memory()
    store.put(KEY, Measured(Plan(8, "128x4"), 5.0))
    assert run(ScriptedBackend(("128x4", "8x4"), fault), 8, store=store).plans == {8: Plan(8, "8x4")}
    assert "was measured here before, but does not work now (RuntimeError: no cubin)" in caplog.text


def test_a_bucket_that_fails_is_reported_and_the_others_serve(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: one M that a kernel lacks, which ends the process or the layer."""

    def fault(plan: Plan, out: Tensor) -> None:
        if plan.bucket >= 256:
            raise RuntimeError("no kernel for M >= 256")

    warmed = run(ScriptedBackend(fault=fault), 8, 256)
    assert warmed.plans == {8: Plan(8, "8x4")}
    [failure] = warmed.failures
    assert failure.bucket == 256
    assert "RuntimeError: no kernel for M >= 256" in failure.reason
    assert "scripted cannot serve bucket 256" in caplog.text


def leaks(plan: Plan, out: Tensor) -> None:
    out[0, 0] = torch.nan


def masks_nothing(plan: Plan, out: Tensor) -> None:
    out[-1] = 448.0


def masks_in_part(plan: Plan, out: Tensor) -> None:
    out[-1, N // 2] = 0.0


def one_column_doubled(plan: Plan, out: Tensor) -> None:
    out[:, 77] *= 2


def two_rows_swapped(plan: Plan, out: Tensor) -> None:
    out[[0, 5]] = out[[5, 0]]


def columns_swapped(plan: Plan, out: Tensor) -> None:
    out[:, [0, 129]] = out[:, [129, 0]]


def last_column_stale(plan: Plan, out: Tensor) -> None:
    out[:, -1] = 7.0


def without_a_bias(plan: Plan, out: Tensor) -> None:
    assert WEIGHT.bias is not None
    out -= WEIGHT.bias.to(out.dtype)


def all_stale(plan: Plan, out: Tensor) -> None:
    out.fill_(7.0)


def zeros(plan: Plan, out: Tensor) -> None:
    out[:-2] = 0.0


@pytest.mark.parametrize(
    "fault",
    [
        leaks,
        masks_nothing,
        masks_in_part,
        one_column_doubled,
        two_rows_swapped,
        columns_swapped,
        last_column_stale,
        without_a_bias,
        all_stale,
        zeros,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_wrong_forward_fails_its_bucket(fault: Fault) -> None:
    """Guards: a kernel that answers, wrongly, and would be served."""
    warmed = run(ScriptedBackend(fault=fault), 16)
    assert warmed.plans == {}
    assert [failure.bucket for failure in warmed.failures] == [16]


def test_rows_that_are_not_written_are_not_taken_for_masked_ones() -> None:
    """Guards: an output that holds NaN before, where NaN is what is expected."""

    def fault(plan: Plan, out: Tensor) -> None:
        out[-2:] = backend.before[-2:]

    backend = ScriptedBackend(fault=fault)
    assert "and y is not NaN throughout that row" in run(backend, 16).failures[0].reason


def test_a_faint_column_that_is_wrong_fails_the_bucket() -> None:
    """Guards: one wrong row of the weight, which no norm over a whole row of y shows."""

    def fault(plan: Plan, out: Tensor) -> None:
        out[:, 5] *= 2

    rows = spread(N, K) / 2**14
    rows[5] /= 2**10
    weight, backend = MxWeight.from_float(rows), ScriptedBackend(fault=fault)
    prepared = backend.prepare(weight, CPU)
    warmed = warm_up(backend, prepared, weight, CPU, (16,), memory(), timer=FastTimer())
    assert "column 5 is 1 off emulation" in warmed.failures[0].reason


def permuted_scales() -> MxWeight:
    return replace(WEIGHT, scales=WEIGHT.scales.roll(1, dims=0))


def another_block() -> MxWeight:
    return replace(WEIGHT, scales=WEIGHT.scales.roll(1, dims=1))


@pytest.mark.parametrize("served", [permuted_scales, another_block], ids=lambda f: f.__name__)
def test_a_weight_prepared_wrongly_fails_every_bucket(served: Callable[[], MxWeight]) -> None:
    """Guards: a scale layout read as another."""
    backend = ScriptedBackend()
    prepared = backend.prepare(served(), CPU)
    warmed = warm_up(backend, prepared, WEIGHT, CPU, (1, 8, 64), memory(), timer=FastTimer())
    assert [failure.bucket for failure in warmed.failures] == [64, 8, 1]


def test_rows_beyond_m_hold_nan_in_the_trial() -> None:
    """Guards: a trial on clean rows, which a kernel that mixes rows passes."""
    backend = ScriptedBackend()
    run(backend, 8)
    assert backend.xs[0][6:, :K].isnan().all()
    assert backend.xs[0][:6].isfinite().all()


class RecordingTuner:
    """Notes what forwards ran in which context; `missing` buckets raise while served."""

    def __init__(self, backend: ScriptedBackend, missing: tuple[int, ...] = ()) -> None:
        self.seen: list[tuple[str, Plan]] = []
        self.inside = ""
        self.missing = missing
        backend.fault = self._note

    def _note(self, plan: Plan, out: Tensor) -> None:
        self.seen.append((self.inside, plan))
        if self.inside == "serving" and plan.bucket in self.missing:
            raise RuntimeError("autotune strict replay miss")

    @contextmanager
    def _context(self, name: str) -> Iterator[None]:
        assert not self.inside, "the contexts do not nest"
        self.inside = name
        try:
            yield
        finally:
            self.inside = ""

    def tuning(self) -> object:
        return self._context("tuning")

    def serving(self) -> object:
        return self._context("serving")


def test_every_plan_is_tuned_before_it_is_served() -> None:
    """Guards: an untuned tactic that is measured, and chosen or not for that."""
    backend = ScriptedBackend(("8x4", "128x4"))
    tuner = RecordingTuner(backend)
    run(backend, 8, tuner=tuner)
    contexts = [context for context, _ in tuner.seen]
    assert contexts == sorted(contexts, key=["tuning", "serving"].index)
    assert [plan.layout for context, plan in tuner.seen if context == "tuning"] == ["8x4", "128x4"]


def test_a_stored_plan_is_tuned_alone() -> None:
    backend, store = ScriptedBackend(("8x4", "128x4")), memory()
    store.put(KEY, Measured(Plan(8, "128x4"), 5.0))
    tuner = RecordingTuner(backend)
    run(backend, 8, store=store, tuner=tuner)
    plan = Plan(8, "128x4")
    # Verified, then run and repeated: the tuner's own store may be lost, and another kernel tuned.
    assert tuner.seen == [("tuning", plan)] + [("serving", plan)] * (1 + 1 + REPETITIONS)


def test_a_plan_that_raises_while_tuned_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fault(plan: Plan, out: Tensor) -> None:
        if plan.layout == "8x4":
            raise RuntimeError("no kernel")

    assert run(ScriptedBackend(("8x4", "128x4"), fault), 8).plans == {8: Plan(8, "128x4")}


def test_a_tuning_miss_fails_the_bucket() -> None:
    """Guards: a silent tactic -1."""
    backend = ScriptedBackend()
    warmed = run(backend, 8, 16, tuner=RecordingTuner(backend, missing=(16,)))
    assert warmed.plans == {8: Plan(8, "8x4")}
    assert "strict replay miss" in warmed.failures[0].reason


@pytest.mark.parametrize("name", [name for name in BACKENDS if name.startswith("flashinfer_")])
def test_flashinfer_is_tuned_before_it_serves(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Guards: a GEMM of FlashInfer outside its tuner's contexts, where an untuned one runs in silence."""
    machine = simulate(monkeypatch)
    backend = BACKENDS[name]()
    prepared = backend.prepare(WEIGHT, CPU)
    tuner = tuner_for(name, None, (8, 16))
    warmed = warm_up(backend, prepared, WEIGHT, CPU, (8, 16), memory(), timer=FastTimer(), tuner=tuner)
    assert warmed.failures == ()
    assert all(plan in backend.plans(bucket) for bucket, plan in warmed.plans.items())
    assert list(warmed.plans) == [16, 8]
    modes = [call["mode"] for function, call in machine.calls if function == "autotune_v2"]
    assert modes == ["tune", "replay"] * 2
    first = next(function for function, _ in machine.calls if function in ("autotune_v2", "mm_mxfp8"))
    assert first == "autotune_v2"


# The comparison itself.


def emulate(x: Tensor, weight: MxWeight) -> Tensor:
    backend = Emulation()
    prepared = backend.prepare(weight, CPU)
    out = torch.empty(len(x), weight.n, dtype=torch.bfloat16)
    backend.forward(x, prepared, Plan(len(x)), out)
    return out


@pytest.mark.parametrize("elements", [1 << 22, 4096, 1], ids="elements{}".format)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 33), (7, 130, 384), (64, 5, 1536)], ids=str)
def test_the_reference_is_emulation_whatever_its_tiles(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, elements: int
) -> None:
    """Guards: a tile of columns that is left out, or compared with another's."""
    monkeypatch.setattr(reference, "_ELEMENTS", elements)
    weight = MxWeight.from_float(spread(n, k, seed=n), spread(1, n, seed=2)[0])
    x = sample_rows(m, k, weight.k_pad, CPU)
    y = emulate(x, weight)
    assert Reference(weight, CPU).check(x, y) < 2.0**-8
    for column in {0, n // 2, n - 1}:
        wrong = y.clone()
        wrong[:, column] = 3 * y[:, column] + 1
        if n < 100 or m >= 8:
            with pytest.raises(Exception, match="off emulation"):
                Reference(weight, CPU).check(x, wrong)


def test_x_may_have_more_columns_than_emulation_needs() -> None:
    """Guards: a backend that pads K to 256, held against one that pads it to 32."""
    weight = MxWeight.from_float(spread(5, 33))
    x = sample_rows(4, 33, 256, CPU)
    assert Reference(weight, CPU).check(x, emulate(x[:, :64].contiguous(), weight)) == 0.0


def test_a_zero_row_is_right_only_if_zero() -> None:
    weight = MxWeight.from_float(spread(5, 64))
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    y = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert Reference(weight, CPU).check(x, y) == 0.0
    y[1, 1] = 2.0**-120
    with pytest.raises(Exception, match="row 1 is inf off emulation"):
        Reference(weight, CPU).check(x, y)


def test_a_stored_plan_that_no_longer_repeats_is_chosen_anew() -> None:
    """Guards: a plan file beside a tuner's store that was lost, and an unstable kernel tuned in its place."""
    calls: list[int] = []

    def flips(plan: Plan, out: Tensor) -> None:
        calls.append(1)
        if plan.layout == "8x4" and len(calls) % 2:
            out.view(torch.int16)[0, 0] ^= 1

    store = memory()
    store.put(KEY, Measured(Plan(8, "8x4"), 1.0))
    result = run(ScriptedBackend(("8x4", "128x4"), flips), 8, store=store)
    assert result.plans == {8: Plan(8, "128x4")}
