"""A layer's new weight beside the one that is served: prepared, tried, exchanged.

One form for each backend that runs a bucket of the layer. It is the one copy of a weight that a refit takes;
with it, the memory goes back to torch's allocator, which gives it to the next.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .backends.base import Backend, Plan, PreparedWeight
from .backends.storage import Exchange, device_of, paired
from .check import rows_for
from .checkpoint.base import LayerWeights
from .errors import DeviceLost
from .layer import Layer


@dataclass(frozen=True, eq=False)
class Form:
    """The new weight as one backend computes with it, the live one, and a bucket to try it at."""

    backend: Backend
    live: PreparedWeight
    new: PreparedWeight
    bucket: int
    plan: Plan


@dataclass(frozen=True, eq=False)
class Shadow:
    """`rows` BF16 [m, K] are what it is tried with; `forms` the one that answers so many rows first."""

    forms: tuple[Form, ...]
    rows: Tensor

    @classmethod
    def prepare(cls, layer: Layer, weights: LayerWeights) -> Shadow:
        """On any thread, while forwards run. Errors: BackendError for values that a backend cannot hold."""
        rows = rows_for(layer, weights.probe)
        forms = tuple(_form(layer, weights, bucket) for bucket in _buckets(layer, len(rows)))
        return cls(forms, rows)

    def try_out(self) -> list[Tensor]:
        """y BF16 [m, N] of each form, on the CPU; on the device thread, since kernels share workspaces."""
        return [_forward(form, self.rows) for form in self.forms]

    def exchange(self) -> None:
        """On the device thread: every live form has the new content, or, if this raises, what it had."""
        exchange = Exchange([pair for form in self.forms for pair in paired(form.live, form.new)])
        devices = {device_of(form.live) for form in self.forms}
        _wait(devices)  # forwards on other streams read the weight until they end
        try:
            exchange.run()
            _wait(devices)
        except Exception as error:
            _undo(exchange, devices, error)
            raise


def _undo(exchange: Exchange, devices: set[torch.device], why: Exception) -> None:
    try:
        exchange.undo()
        _wait(devices)
    except Exception as error:
        raise DeviceLost(
            f"A weight could neither be replaced ({type(why).__name__}) nor put back "
            f"({type(error).__name__}): the server ends with status 1, to be started "
            "again"
        ) from error


def _buckets(layer: Layer, rows: int) -> list[int]:
    """One bucket for each prepared weight of the layer, that which would answer so many rows first."""
    by_bucket = layer.routes.by_bucket
    nearest = sorted(by_bucket, key=lambda bucket: (bucket < rows, abs(bucket - rows)))
    chosen: dict[int, int] = {}
    for bucket in nearest:
        chosen.setdefault(id(by_bucket[bucket].weight), bucket)
    return list(chosen.values())


def _form(layer: Layer, weights: LayerWeights, bucket: int) -> Form:
    route = layer.routes.by_bucket[bucket]
    device = device_of(route.weight)
    with aside(device):
        new = route.backend.prepare(weights.weight, device)
    paired(route.weight, new)
    return Form(route.backend, route.weight, new, bucket, route.plan)


def aside(device: torch.device) -> AbstractContextManager[None]:
    """For a weight that is prepared while forwards run: a stream beside theirs, always the same one, because
    memory is given again on its own stream."""
    return nullcontext() if device.type != "cuda" else _OnStream(_stream(device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _OnStream(AbstractContextManager[None]):
    """Work on a CUDA stream, complete when the block ends."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)
        self._stream.synchronize()


def _forward(form: Form, rows: Tensor) -> Tensor:
    """y BF16 [m, N], a bucket at a time."""
    return torch.cat([_part(form, part) for part in rows.split(form.bucket)])


def _part(form: Form, rows: Tensor) -> Tensor:
    x = torch.zeros(form.bucket, form.new.k_pad, dtype=torch.bfloat16)
    x[: len(rows), : rows.shape[1]] = rows
    device = device_of(form.live)
    out = torch.empty(form.bucket, form.new.n_pad, dtype=torch.bfloat16, device=device)
    form.backend.forward(x.to(device), form.new, form.plan, out)
    return out[: len(rows), : form.new.n].cpu()


def _wait(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
