"""Before a layer is served: a plan for each bucket, and one real forward of it held against emulation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .backends.base import Backend, Plan, PreparedWeight
from .backends.emulation import Emulation
from .mxfp8.weight import MxWeight
from .plans import PlanKey, PlanStore
from .reference import Reference
from .sample import UNWRITTEN, sample_rows
from .timer import Timer, timer_for
from .tuning import REPETITIONS, NoTuner, Tuner, check_repeats, choose, reason, refuse_lost

log = logging.getLogger("gemmwire.warmup")


@dataclass(frozen=True)
class BucketFailure:
    """A bucket that the backend cannot serve here, for the next backend to take."""

    bucket: int
    reason: str


@dataclass(frozen=True)
class WarmUp:
    """The plan of each bucket that works, and the buckets that do not."""

    plans: dict[int, Plan]
    failures: tuple[BucketFailure, ...]


def warm_up(
    backend: Backend,
    weight: PreparedWeight,
    reference: MxWeight,
    device: torch.device,
    buckets: Sequence[int],
    store: PlanStore,
    *,
    tuner: Tuner | None = None,
    timer: Timer | None = None,
) -> WarmUp:
    """Find a plan for each bucket, the largest first, and try it; to be called on the device thread.

    `weight` is what `backend` prepared of `reference`. A plan is taken from the store if it still works, else
    chosen by measurement. It works if a forward with it, whose rows beyond m hold NaN, agrees with emulation
    of the same bucket in the rows before. Emulation on a CPU is its own reference: nothing is run.
    Errors: BackendError where the device is lost; whatever else a bucket raises is its failure.
    """
    if backend.name == Emulation.name and device.type == "cpu":
        return WarmUp({bucket: backend.plans(bucket)[0] for bucket in buckets}, ())
    warmer = _Warmer(backend, weight, Reference(reference, device), device, store)
    plans: dict[int, Plan] = {}
    failures: list[BucketFailure] = []
    clock = timer if timer is not None else timer_for(device)
    for bucket in sorted(buckets, reverse=True):
        try:
            plans[bucket] = warmer.plan(bucket, tuner or NoTuner(), clock)
        except Exception as error:  # whatever a kernel raises, the next backend may run this bucket
            refuse_lost(device, error)
            failures.append(BucketFailure(bucket, reason(error)))
            log.warning("%s cannot serve bucket %d: %s", backend.name, bucket, failures[-1].reason)
    return WarmUp(plans, tuple(failures))


@dataclass(frozen=True)
class _Warmer:
    """What is the same at every bucket of one layer."""

    backend: Backend
    weight: PreparedWeight
    reference: Reference
    device: torch.device
    store: PlanStore

    def plan(self, bucket: int, tuner: Tuner, timer: Timer) -> Plan:
        stored = self._stored(bucket)
        if stored is not None:
            self._tune((stored,), tuner)
            with tuner.serving():
                if self._still_works(stored):
                    return stored
        self._tune(self.backend.plans(bucket), tuner)
        with tuner.serving():
            return choose(
                self.backend,
                self.weight,
                bucket,
                self.store,
                timer,
                device=self.device,
                verify=self.verify,
                repetitions=REPETITIONS,
            )

    def _stored(self, bucket: int) -> Plan | None:
        """The plan on file, if the backend still has it among its candidates."""
        measured = self.store.get(PlanKey(self.backend.name, self.weight.n_pad, self.weight.k_pad, bucket))
        candidates = self.backend.plans(bucket)
        return next((plan for plan in candidates if measured is not None and plan == measured.plan), None)

    def _tune(self, plans: Sequence[Plan], tuner: Tuner) -> None:
        """One forward each, for the tuner. A plan that raises here does so again where it is judged."""
        with tuner.tuning():
            for plan in plans:
                try:
                    self._forward(plan)
                except Exception as error:
                    refuse_lost(self.device, error)
                    log.debug("%s: %s did not run while tuned: %s", self.backend.name, plan, reason(error))

    def _still_works(self, plan: Plan) -> bool:
        try:
            self.verify(plan)
            check_repeats(*self._repeatable(plan), REPETITIONS)
        except Exception as error:
            refuse_lost(self.device, error)
            log.warning(
                "%s: %s was measured here before, but does not work now (%s); choosing anew",
                self.backend.name,
                plan,
                reason(error),
            )
            return False
        return True

    def _repeatable(self, plan: Plan) -> tuple[Callable[[], None], torch.Tensor]:
        """A forward to repeat, and the output it writes: the tuner may have taken another kernel."""
        x = sample_rows(plan.bucket, self.weight.k, self.weight.k_pad, self.device)
        out = torch.empty(plan.bucket, self.weight.n_pad, dtype=torch.bfloat16, device=self.device)
        return partial(self.backend.forward, x, self.weight, plan, out), out

    def verify(self, plan: Plan) -> None:
        """Errors: BackendError where a forward with `plan` is not what emulation gives."""
        x, out = self._forward(plan)
        self.reference.check(x, out[:, : self.weight.n])

    def _forward(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """x, its last quarter NaN, and the y that the backend made of it."""
        x = sample_rows(plan.bucket, self.weight.k, self.weight.k_pad, self.device)
        x[plan.bucket - plan.bucket // 4 :, : self.weight.k] = torch.nan
        out = torch.full(
            (plan.bucket, self.weight.n_pad), UNWRITTEN, dtype=torch.bfloat16, device=self.device
        )
        self.backend.forward(x, self.weight, plan, out)
        return x, out
