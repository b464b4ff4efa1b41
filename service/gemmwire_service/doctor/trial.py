"""One small layer through one backend, as the server would run it: prepare, plan, then a few requests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.base import Backend, LayerSpec, Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.buckets import Ladder
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.format import dequantize, quantize
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.plans import Environment, PlanStore
from gemmwire_service.reference import Reference
from gemmwire_service.sample import sample_rows
from gemmwire_service.timer import timer_for
from gemmwire_service.tuning import Tuner, reason, tuner_for
from gemmwire_service.warmup import warm_up

SPEC = LayerSpec("check", n=130, k=384, bias=True)  # ragged: N is padded by every kernel, K by TensorRT-LLM's
ROWS = (1, 7, 9)
TIMEOUT = 900  # seconds: FlashInfer may compile its kernels first
_EXACT_TOLERANCE = 2.0**-8
_CPU = torch.device("cpu")

WORKS, FAILS, PASSED_OVER = "works", "fails", "passed_over"


@dataclass(frozen=True)
class Trial:
    """What became of one backend.

    status: "works", "fails" or "passed_over", with the reason unless it works. error: the largest of a row,
    relative to its norm, against emulation on the CPU (emulation's own is against float64). microseconds: of
    a forward, by the rows of the request.
    """

    name: str
    status: str
    reason: str | None = None
    error: float | None = None
    microseconds: dict[str, float] = field(default_factory=dict)


def try_backend(name: str, device: torch.device) -> Trial:
    """Whatever it raises is its reason, so that the next can be tried."""
    try:
        backend = BACKENDS[name]()
        against = backend.unavailable(device) or backend.rejects(SPEC)
        return _run(backend, device) if against is None else Trial(name, PASSED_OVER, against)
    except Exception as error:
        return Trial(name, FAILS, reason(error))


def try_isolated(name: str, device: torch.device, timeout: float = TIMEOUT) -> Trial:
    """In a process of its own: a kernel that ends the process, or loses the GPU to it, ends only that one."""
    command = [sys.executable, "-m", __name__, name, str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    except subprocess.TimeoutExpired:
        return Trial(name, FAILS, f"it was not done after {timeout:.0f} s")
    try:
        return Trial(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return Trial(name, FAILS, f"its process ended with {_status(done.returncode)}: {_last(done.stderr)}")


def _run(backend: Backend, device: torch.device) -> Trial:
    weight = _weight()
    prepared = backend.prepare(weight, device)
    buckets = tuple(sorted({Ladder().bucket_for(rows) for rows in ROWS}))
    tuner = tuner_for(backend.name, None, buckets)
    store = PlanStore(None, Environment.of(device))
    warmed = warm_up(backend, prepared, weight, device, buckets, store, tuner=tuner)
    if warmed.failures:
        raise BackendError("; ".join(f"M={failure.bucket}: {failure.reason}" for failure in warmed.failures))
    return _requests(backend, prepared, weight, warmed.plans, tuner, device)


def _requests(
    backend: Backend,
    prepared: PreparedWeight,
    weight: MxWeight,
    plans: dict[int, Plan],
    tuner: Tuner,
    device: torch.device,
) -> Trial:
    timer = timer_for(device)
    errors: list[float] = []
    microseconds: dict[str, float] = {}
    for rows in ROWS:
        plan = plans[Ladder().bucket_for(rows)]
        x = sample_rows(plan.bucket, SPEC.k, prepared.k_pad, device)
        x[rows:] = 0
        out = torch.full((plan.bucket, prepared.n_pad), torch.nan, dtype=torch.bfloat16, device=device)
        with tuner.serving():
            forward = partial(backend.forward, x, prepared, plan, out)
            forward()
            errors.append(_error(backend, x[:rows].cpu(), out[:rows, : SPEC.n].cpu(), weight))
            microseconds[str(rows)] = round(timer.microseconds(forward), 2)
    return Trial(backend.name, WORKS, None, max(errors), microseconds)


def _error(backend: Backend, x: torch.Tensor, y: torch.Tensor, weight: MxWeight) -> float:
    """Errors: BackendError where it is beyond the tolerance."""
    if backend.name != Emulation.name:
        return Reference(weight, _CPU).check(x, y)
    operand = dequantize(*quantize(x[:, : weight.k_pad].contiguous()), torch.float64)
    exact = operand @ dequantize(weight.codes, weight.scales, torch.float64).T
    if weight.bias is not None:
        exact += weight.bias.double()
    error = float(((y.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())
    if not error <= _EXACT_TOLERANCE:
        raise BackendError(f"a row is {error:.3g} off float64; at most {_EXACT_TOLERANCE:.3g} is right")
    return error


def _weight() -> MxWeight:
    rows = sample_rows(SPEC.n, SPEC.k, SPEC.k, _CPU).float()
    return MxWeight.from_float(rows / 64, sample_rows(1, SPEC.n, SPEC.n, _CPU)[0].float())


def _status(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def main(arguments: Sequence[str]) -> int:
    name, device = arguments
    print("\n" + json.dumps(asdict(try_backend(name, torch.device(device)))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
