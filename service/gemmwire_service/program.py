"""The forward of one bucket of a layer between tensors that stay where they are.

A graph holds addresses. So x and y of every layer lie in tensors that outlive the graphs, one x for each K
and one y for each N of a device, which the forwards of all buckets share: they run one after the other. The
weight is read where its backend keeps it, which a refit does not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .capture import Run
from .mail import Mailbox
from .routes import Route
from .streams import Streams

BF16 = 2  # bytes
# Bytes of a bucket's x, and of its y, up to which the graph copies for itself; more is copied faster beside
# other forwards. On an H200 with N=K=4096, M=16 takes 38 us there and back instead of 41; M=128 would have
# half its throughput.
MAILED_UP_TO = 256 << 10


@dataclass(eq=False)
class StaticX:
    """BF16 [rows, k_pad], flat. Rows from `filled` on are zero, and those between a bucket's m and its end
    once `load` has run."""

    flat: Tensor
    k_pad: int
    filled: int = 0

    def __post_init__(self) -> None:
        self._at = self.flat.data_ptr()
        self._row = self.k_pad * self.flat.element_size()  # bytes

    def rows(self, bucket: int) -> Tensor:
        return self.flat[: bucket * self.k_pad].view(bucket, self.k_pad)

    def load(self, streams: Streams, source: int, m: int, bucket: int) -> None:
        """Rows 0..m from BF16 [m, k_pad] at an address, queued on the compute stream; m..bucket zero."""
        streams.copy(self._at, source, m * self._row, streams.compute)
        dirty = min(self.filled, bucket)
        if m < dirty:
            streams.zero(self._at + m * self._row, (dirty - m) * self._row, streams.compute)
        self.loaded(m, bucket)

    def loaded(self, m: int, bucket: int) -> None:
        """m rows are there, and zeros from them to the bucket's end."""
        if self.filled <= bucket:
            self.filled = m

    def spoil(self) -> None:
        """Somebody wrote to it by another way."""
        self.filled = self.flat.numel() // self.k_pad


class Statics:
    """The static x of each K and y of each N on one device, as large as its largest bucket."""

    def __init__(self, device: torch.device, largest: int) -> None:
        self._device = device
        self._largest = largest
        self._xs: dict[int, StaticX] = {}
        self._ys: dict[int, Tensor] = {}

    def x(self, k_pad: int) -> StaticX:
        if k_pad not in self._xs:
            self._xs[k_pad] = StaticX(self._zeros(k_pad), k_pad)
        return self._xs[k_pad]

    def y(self, n: int) -> Tensor:
        """BF16 [largest * n], flat."""
        if n not in self._ys:
            self._ys[n] = self._zeros(n)
        return self._ys[n]

    def _zeros(self, width: int) -> Tensor:
        with torch.inference_mode(False):  # such a tensor can be written to in any mode
            return torch.zeros(self._largest * width, dtype=torch.bfloat16, device=self._device)


@dataclass(eq=False)
class Program:
    """The forward of one bucket of one layer, from its static x to its static y [bucket, n], contiguous.

    `run` queues it: the replay of a graph where it is `captured`, else call by call on the current stream.
    """

    bucket: int
    n: int
    x: StaticX
    y: Tensor
    out: Tensor  # [bucket, n_pad]; y itself where N needs no padding
    eager: Run
    run: Run
    captured: bool = False
    mail: Mailbox | None = None  # where the graph finds its x and y: it copies for itself
    microseconds: float = math.inf  # of a replay

    def __post_init__(self) -> None:
        self.y_at = self.y.data_ptr()

    @classmethod
    def of(cls, route: Route, bucket: int, statics: Statics) -> Program:
        weight = route.weight
        x = statics.x(weight.k_pad)
        out = statics.y(weight.n_pad)[: bucket * weight.n_pad].view(bucket, weight.n_pad)
        y = out
        if weight.n_pad != weight.n:
            y = statics.y(weight.n)[: bucket * weight.n].view(bucket, weight.n)
        eager = partial(_forward, route, x.rows(bucket), out, y)
        return cls(bucket, weight.n, x, y, out, eager, eager)

    @property
    def widest(self) -> int:
        """Elements of a row, of x or of y."""
        return max(self.x.k_pad, self.n)

    @property
    def small(self) -> bool:
        return self.bucket * self.widest * BF16 <= MAILED_UP_TO

    def mailed(self, mail: Mailbox) -> None:
        """The forward with the copies before and after it."""
        mail.bring(self.x.rows(self.bucket))
        self.eager()
        mail.send(self.y)


def _forward(route: Route, x: Tensor, out: Tensor, y: Tensor) -> None:
    """Quantize, multiply, add the bias, mask, slice to N."""
    route.backend.forward(x, route.weight, route.plan, out)
    if y is not out:
        y.copy_(out[:, : y.shape[1]])
