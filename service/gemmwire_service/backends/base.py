"""What a backend is: five verbs and a name.

Two questions are kept apart, and each is answered with a reason or None: can this machine (`unavailable`),
and can this layer (`rejects`). A backend that answers None to both runs the layer at every bucket; limits are
not left to be found in a forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gemmwire_service.mxfp8.weight import MxWeight


class Part(NamedTuple):
    """Columns start..stop of a fused layer's y, by the name of the layer that they were."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class LayerSpec:
    """A layer before its weight is read: y [m, n] = x [m, k] @ W.T, plus a bias if it has one.

    `parts`: the layers that it is fused from, along N and in order; none for any other.
    """

    name: str
    n: int
    k: int
    bias: bool
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How one forward is run.

    layout: where the scales of x lie, "8x4" or "128x4"; quantizer: what quantizes x, "cuda", "cute-dsl" or
    "torch". Either is "" where the backend has no choice, or is to make it.
    """

    bucket: int
    layout: str = ""
    quantizer: str = ""


@dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A weight in the form one backend computes with; the backend subclasses this and owns the storage.

    Its fields that are tensors are all of the weight, and their shapes, dtypes and layouts, like all other
    fields, follow from N, K and whether there is a bias: a refit exchanges their content with another's.

    `layout` names the form. x has k_pad columns and the output n_pad; those beyond k are zero, those beyond n
    dropped.
    """

    layout: str
    n: int
    k: int
    n_pad: int
    k_pad: int


class Backend(Protocol):
    """One way to compute a layer. Any number of device threads may share an instance."""

    name: ClassVar[str]

    def unavailable(self, device: torch.device) -> str | None:
        """Why this machine cannot run the backend on `device`, or None: it can."""

    def rejects(self, spec: LayerSpec) -> str | None:
        """Why the backend cannot run this layer, or None: it can, at every bucket."""

    def prepare(self, weight: MxWeight, device: torch.device) -> PreparedWeight:
        """The weight in this backend's form on `device`. Raises BackendError for values it cannot hold.

        It shares no memory with `weight`, which can be freed.
        """

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        """The ways to run a forward of `bucket` rows, the best guess first; measuring tells which it is."""

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        """out = x @ W.T + bias.

        x: BF16 [bucket, k_pad], columns k..k_pad zero; it is not changed. out: BF16 [bucket, n_pad],
        contiguous. A row of x with a NaN or Inf gives a row of NaN and changes no other row.
        Raises TypeError for a weight that another backend prepared.
        """


@runtime_checkable
class Product(Protocol):
    """What a backend may have beside `forward`, where that would copy y to its place."""

    def product(self, x: Tensor, weight: PreparedWeight, plan: Plan) -> Tensor:
        """-> y, which `forward` would write to `out`, in memory of its own."""


def check_shapes(x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
    """Raises ValueError where x or out is not what a forward of the plan takes."""
    if x.shape != (plan.bucket, weight.k_pad) or out.shape != (plan.bucket, weight.n_pad):
        raise ValueError(
            f"x is {list(x.shape)} and out {list(out.shape)}: a forward of bucket {plan.bucket} takes "
            f"[{plan.bucket}, {weight.k_pad}] and [{plan.bucket}, {weight.n_pad}]"
        )


def foreign_weight(name: str, weight: PreparedWeight) -> TypeError:
    """What a backend raises for a weight in a form that is not its own."""
    return TypeError(f"{name} did not prepare this weight: it is {type(weight).__name__}, {weight.layout}")
