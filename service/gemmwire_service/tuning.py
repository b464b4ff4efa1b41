"""The choice of a plan by measurement: what runs, repeats itself to the bit, and is then fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .backends.base import Backend, Plan, PreparedWeight
from .errors import BackendError
from .plans import Measured, PlanKey, PlanStore
from .sample import sample_rows
from .timer import Timer

log = logging.getLogger("gemmwire.tuning")

REPETITIONS = 20

Verify = Callable[[Plan], None]


class Tuner(Protocol):
    """The tuner that a kernel library brings along: it chooses among the library's kernels (tactics) for one
    plan, as `choose` does among plans.

    Both contexts are for forwards of the thread that enters them, and neither nests in the other.
    """

    def tuning(self) -> AbstractContextManager[None]:
        """A forward in here tunes what was not tuned before, for every bucket."""

    def serving(self) -> AbstractContextManager[None]:
        """A forward, or its capture, in here raises where nothing was tuned for it."""


class NoTuner:
    """For a backend whose library chooses its kernels itself."""

    def tuning(self) -> AbstractContextManager[None]:
        return nullcontext()

    def serving(self) -> AbstractContextManager[None]:
        return nullcontext()


def _flashinfer(folder: Path | None, buckets: tuple[int, ...]) -> Tuner:
    from .backends.flashinfer_tuning import FlashInferTuner

    return FlashInferTuner(folder, buckets)


TUNERS: dict[str, Callable[[Path | None, tuple[int, ...]], Tuner]] = {
    "flashinfer_trtllm": _flashinfer,
    "flashinfer_cutedsl": _flashinfer,
    "flashinfer_cutlass": _flashinfer,
    "flashinfer_batch_invariant": _flashinfer,  # its tactics differ in speed, not in a bit
}


def tuner_for(backend: str, folder: Path | None, buckets: tuple[int, ...]) -> Tuner:
    """The tuner of a backend, its results kept under `folder` (None: in memory), for these bucket sizes."""
    return TUNERS[backend](folder, buckets) if backend in TUNERS else NoTuner()


def choose(
    backend: Backend,
    weight: PreparedWeight,
    bucket: int,
    store: PlanStore,
    timer: Timer,
    *,
    device: torch.device,
    verify: Verify = lambda plan: None,
    repetitions: int = REPETITIONS,
) -> Plan:
    """The fastest plan of `backend.plans(bucket)` that can be relied on; it is put into the store.

    A candidate is dropped, with its reason in the log, if it or `verify` raises, or if one of `repetitions`
    forwards of the same rows differs from the first in a bit.
    Errors: BackendError, naming each candidate and its reason, where none is left; or where the device is
    lost.
    """
    x = sample_rows(bucket, weight.k, weight.k_pad, device)
    out = torch.empty(bucket, weight.n_pad, dtype=torch.bfloat16, device=device)
    measured: list[Measured] = []
    dropped: list[str] = []
    for plan in backend.plans(bucket):
        forward = partial(backend.forward, x, weight, plan, out)
        try:
            verify(plan)
            check_repeats(forward, out, repetitions)
            measured.append(Measured(plan, timer.microseconds(forward)))
        except Exception as error:  # whatever a kernel raises, another candidate may run
            refuse_lost(device, error)
            dropped.append(f"{plan}: {reason(error)}")
            log.warning("%s, bucket %d: dropped %s", backend.name, bucket, dropped[-1])
    if not measured:
        raise BackendError(
            f"{backend.name} has no plan for bucket {bucket} (N={weight.n}, K={weight.k}) that works here: "
            f"{'; '.join(dropped) or 'it offers none'}. Serve the bucket with another backend",
            got=dropped,
        )
    best = min(measured, key=lambda candidate: candidate.microseconds)
    store.put(PlanKey(backend.name, weight.n_pad, weight.k_pad, bucket), best)
    log.info("%s, bucket %d: %s", backend.name, bucket, _table(measured, best))
    return best.plan


def reason(error: Exception) -> str:
    """One line, for a log or a report."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def refuse_lost(device: torch.device, error: Exception) -> None:
    """Errors: BackendError where `error` has left the CUDA device unusable for this process."""
    why = loss(device, error)
    if why is not None:
        raise BackendError(
            f"{device} is lost to this process ({why}), after {reason(error)}: nothing more can run "
            "on it; start again with another backend (--backend), and report the kernel",
        ) from error


def loss(device: torch.device, error: Exception) -> str | None:
    """Why the device can do nothing more for this process after `error`, or None: it can."""
    if device.type != "cuda":
        return reason(error) if isinstance(error, torch.AcceleratorError) else None
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        return reason(lost)
    return None


def check_repeats(forward: Callable[[], None], out: Tensor, repetitions: int) -> None:
    """Errors: BackendError at the first repetition that writes other bits into `out`."""
    forward()
    first = out.view(torch.int16).clone()
    for number in range(1, repetitions + 1):
        out.zero_()
        forward()
        different = int((out.view(torch.int16) != first).sum())
        if different:
            raise BackendError(
                f"the same rows gave other bits at repetition {number} of {repetitions}: {different} of "
                f"{first.numel()} elements"
            )


def _table(measured: list[Measured], best: Measured) -> str:
    times = ", ".join(f"{candidate.plan} {candidate.microseconds:.1f} us" for candidate in measured)
    return f"{best.plan} of {times}"
