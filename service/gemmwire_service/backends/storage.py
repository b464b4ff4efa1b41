"""The memory of a prepared weight, and the exchange of its content with that of another.

A refit must not move a weight: captured graphs hold its addresses. So the new form is prepared beside the old
one and the two are exchanged, piece by piece. What is done is known at any moment, hence it can be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from gemmwire_service.backends.base import PreparedWeight
from gemmwire_service.errors import BackendError

PIECE = 16 << 20  # bytes that are kept aside while they are exchanged

Pair = tuple[Tensor, Tensor]


def tensors(form: PreparedWeight) -> tuple[Tensor, ...]:
    """The tensors that a prepared weight owns, in the order of its fields."""
    values = (getattr(form, field.name) for field in fields(form))
    return tuple(value for value in values if isinstance(value, Tensor))


def device_of(form: PreparedWeight) -> torch.device:
    return tensors(form)[0].device


def nbytes(form: PreparedWeight) -> int:
    """Bytes on the device, but for what an opaque layout adds."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(form))


def paired(old: PreparedWeight, new: PreparedWeight) -> list[Pair]:
    """The tensors of two forms, side by side. Raises BackendError where one cannot become the other."""
    if _facts(old) != _facts(new):
        raise BackendError(
            f"the new weight is prepared as {_facts(new)}, and what is served is {_facts(old)}: weights are "
            "replaced in place, which needs the same form; restart the server with the new weight",
            expected=str(_facts(old)),
            got=str(_facts(new)),
        )
    return list(zip(tensors(old), tensors(new), strict=True))


class Exchange:
    """Of the content of tensors, pair by pair; for one thread that nothing else computes beside."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs
        self._done: list[Pair] = []

    def run(self) -> None:
        """What it raises leaves some pairs exchanged and others not: `undo` exchanges those back."""
        for old, new in self._pairs:
            for pair in _pieces(old, new):
                swap(*pair)
                self._done.append(pair)

    def undo(self) -> None:
        while self._done:
            swap(*self._done[-1])
            self._done.pop()


def swap(old: Tensor, new: Tensor) -> None:
    """Exchange the content of two tensors of one form. What it raises leaves `old` as it was."""
    kept = old.clone()
    try:
        old.copy_(new)
        new.copy_(kept)
    except Exception:
        old.copy_(kept)
        raise


def _pieces(old: Tensor, new: Tensor) -> Iterator[Pair]:
    """Views of at most PIECE bytes, as bytes; a tensor in oneDNN's own order is one piece."""
    if old.is_mkldnn:
        yield old, new
        return
    flat = (tensor.view(-1).view(torch.uint8) for tensor in (old, new))
    yield from zip(*(tensor.split(PIECE) for tensor in flat), strict=True)


def _facts(form: PreparedWeight) -> tuple[object, ...]:
    """Everything of a form but the content of its tensors."""
    values = (getattr(form, field.name) for field in fields(form))
    shown = (
        (tuple(value.shape), str(value.dtype), str(value.layout), str(value.device))
        if isinstance(value, Tensor)
        else value
        for value in values
    )
    return (type(form).__name__, *shown)
