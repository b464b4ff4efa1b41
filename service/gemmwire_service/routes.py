"""Which backend runs each bucket of a layer: the best that can, and the next one where that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .backends import Selection, select
from .backends.base import Backend, LayerSpec, Plan, PreparedWeight
from .backends.storage import nbytes
from .mxfp8.weight import MxWeight
from .plans import PlanStore
from .tuning import Tuner, reason, refuse_lost, tuner_for
from .warmup import BucketFailure, warm_up


@dataclass(frozen=True, eq=False)
class Route:
    """How a forward of one bucket is run."""

    backend: Backend
    weight: PreparedWeight
    plan: Plan


@dataclass(frozen=True)
class Fallback:
    """A bucket that a backend was chosen for and failed at; another runs it."""

    bucket: int
    backend: str
    reason: str


@dataclass(frozen=True)
class Routes:
    """The route of every bucket. `selection` is the first backend that runs any, with those passed over."""

    selection: Selection
    by_bucket: dict[int, Route]
    fallbacks: tuple[Fallback, ...]

    @property
    def nbytes(self) -> int:
        """What the weight takes, in every form that a bucket computes with."""
        forms = {id(route.weight): route.weight for route in self.by_bucket.values()}
        return sum(nbytes(form) for form in forms.values())


@dataclass
class Router:
    """What the layers of a server share on their way to a route; for the device thread."""

    device: torch.device
    buckets: tuple[int, ...]
    choice: str
    store: PlanStore
    cache: Path | None
    tuners: dict[str, Tuner] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)

    def route(self, spec: LayerSpec, weight: MxWeight, made: PreparedWeight | None = None) -> Routes:
        """Prepare the weight and try every bucket of it, backend after backend, until each has a route.

        `made`: the weight as the first of them has prepared it already.

        Errors: BackendError naming each backend with its reason where a bucket is left; a backend that was
        named alone is binding, and its failure at any bucket is that error.
        """
        failed: dict[str, str] = {}
        fallbacks: list[Fallback] = []
        routes: dict[int, Route] = {}
        first: Selection | None = None
        missing = self.buckets
        while missing:
            selection = self._shared(select(spec, self.device, self.choice, failed))
            name = selection.backend.name
            found, failures = self._try(selection.backend, weight, missing, made)
            made = None
            routes |= found
            fallbacks += [Fallback(each.bucket, name, each.reason) for each in failures]
            missing = tuple(each.bucket for each in failures)
            if missing:
                failed[name] = _summary(failures)
            if first is None and found:
                first = selection
        if first is None:
            raise ValueError("a ladder without buckets has no routes")
        return Routes(first, routes, tuple(fallbacks))

    def _shared(self, selection: Selection) -> Selection:
        """The same with the instance that other layers have: an instance keeps scratch memory for itself."""
        backend = self.backends.setdefault(selection.backend.name, selection.backend)
        return replace(selection, backend=backend)

    @contextmanager
    def serving(self, routes: Routes) -> Iterator[None]:
        """For forwards of a layer before it is served: by the kernels that will serve it, tuned."""
        names = {route.backend.name for route in routes.by_bucket.values()}
        with ExitStack() as stack:
            for tuner in {self.tuners[name] for name in names}:
                stack.enter_context(tuner.serving())
            yield

    def _try(
        self,
        backend: Backend,
        weight: MxWeight,
        buckets: tuple[int, ...],
        made: PreparedWeight | None,
    ) -> tuple[dict[int, Route], tuple[BucketFailure, ...]]:
        """What the backend runs of these buckets; its form of the weight is kept by the routes alone."""
        try:
            form = made or backend.prepare(weight, self.device)
        except Exception as error:  # out of memory, or values it cannot hold: another backend may
            refuse_lost(self.device, error)
            return {}, tuple(BucketFailure(bucket, reason(error)) for bucket in buckets)
        tuner = self.tuners.setdefault(backend.name, tuner_for(backend.name, self.cache, self.buckets))
        result = warm_up(backend, form, weight, self.device, buckets, self.store, tuner=tuner)
        return {b: Route(backend, form, plan) for b, plan in result.plans.items()}, result.failures


def _summary(failures: tuple[BucketFailure, ...]) -> str:
    """One reason for all the buckets at which a backend failed."""
    shown = ", ".join(str(each.bucket) for each in failures)
    return f"failed at M={shown}: {failures[0].reason}"
