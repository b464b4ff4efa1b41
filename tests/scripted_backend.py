"""A backend that computes what emulation does, and then whatever a test has it do wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation

Fault = Callable[[Plan, Tensor], None]
"""Called after a forward with its plan and its output; it may change the output, or raise."""


def no_fault(plan: Plan, out: Tensor) -> None:
    pass


class ScriptedBackend:
    """Offers a plan for each of `layouts`; `forwards` lists the plans that ran."""

    name: ClassVar[str] = "scripted"

    def __init__(self, layouts: Sequence[str] = ("8x4",), fault: Fault = no_fault) -> None:
        self.layouts = list(layouts)
        self.fault = fault
        self.forwards: list[Plan] = []
        self.xs: list[Tensor] = []
        self.before = torch.empty(0)  # what the output of the last forward held until then
        self._emulation = Emulation()

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def rejects(self, spec: LayerSpec) -> str | None:
        return None

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return tuple(Plan(bucket, layout) for layout in self.layouts)

    def prepare(self, weight: object, device: torch.device) -> PreparedWeight:
        return self._emulation.prepare(weight, device)  # type: ignore[arg-type]

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        self.forwards.append(plan)
        self.xs.append(x.clone())
        self.before = out.clone()
        self._emulation.forward(x, weight, Plan(plan.bucket), out)
        self.fault(plan, out)


class ScriptedTimer:
    """Answers with `times` in order, each after one real run."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def microseconds(self, run: Callable[[], None]) -> float:
        run()
        return self.times.pop(0)
