"""Linear layers side by side that the server computes as one: q, k and v, or gate and up."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .linear import RemoteLinear, prepared
from .operator import remote_linear


class RemotePart(nn.Module):
    """The columns start..stop of a fused layer: where `k_proj` stood, which the server holds in `qkv_proj`.

    The first part that is called with a tensor asks for all of y, and the others take theirs from it if they
    are called with the same tensor, on the same thread, before another is. That is known by identity and by
    the count of writes to it, which tensors made in inference mode do not have: do not write to one of those
    between its parts. In a compiled graph each part asks for all of y by a request of its own.
    """

    def __init__(self, whole: RemoteLinear, part: str, start: int, stop: int, shared: _Shared) -> None:
        super().__init__()
        # In a tuple, so that the fused layer is no submodule of each of its parts.
        self._whole = (whole,)
        self.part = part
        self.start = start
        self.stop = stop
        self._shared = shared

    @property
    def in_features(self) -> int:
        return self._whole[0].in_features

    @property
    def out_features(self) -> int:
        return self.stop - self.start

    def forward(self, x: Tensor) -> Tensor:
        whole = self._whole[0]
        if torch.compiler.is_compiling():
            y = remote_linear(prepared(x, whole.layer), whole.url, whole.layer, whole.out_features)
        else:
            y = self._shared.y(x, whole, self.part)
        part: Tensor = y[..., self.start : self.stop].contiguous()
        return part

    def extra_repr(self) -> str:
        return f"{self._whole[0].extra_repr()}, columns={self.start}..{self.stop}"


class _Shared:
    """The last y of a fused layer, for its other parts; of each thread its own."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._threads = threading.local()

    def y(self, x: Tensor, whole: RemoteLinear, part: str) -> Tensor:
        kept: _Kept | None = self._threads.__dict__.get("kept")
        if kept is None or part in kept.taken or not kept.is_of(x):
            kept = self._threads.kept = _Kept(x, whole(x))
        kept.taken.add(part)
        if len(kept.taken) == self._parts:
            del self._threads.kept
        return kept.y

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return _Shared(self._parts)

    def __reduce__(self) -> tuple[type[_Shared], tuple[int]]:
        return _Shared, (self._parts,)


class _Kept:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x = weakref.ref(x)
        self._writes = _writes(x)
        self.y = y
        self.taken: set[str] = set()

    def is_of(self, x: Tensor) -> bool:
        return self._x() is x and self._writes == _writes(x)


def _writes(x: Tensor) -> int | None:
    """How often x has been written to; None in inference mode, where nobody counts."""
    return None if x.is_inference() else x._version


def parts_of(whole: RemoteLinear, columns: dict[str, tuple[int, int]]) -> dict[str, RemotePart]:
    """The parts of a fused layer, by name, from their columns."""
    shared = _Shared(len(columns))
    return {name: RemotePart(whole, name, *bounds, shared) for name, bounds in columns.items()}
