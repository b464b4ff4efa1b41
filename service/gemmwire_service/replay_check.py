"""Whether a graph is its forward: replays held against an eager run, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .errors import BackendError
from .sample import UNWRITTEN, sample_rows

REPLAYS = 20
POISONS = (0.0, float("nan"), 448.0, float("inf"))
"""What the rows below m hold, in turn: nothing may find its way from there into the rows above."""

Run = Callable[[], None]


class Rows(Protocol):
    """A static x."""

    @property
    def k_pad(self) -> int: ...

    def rows(self, bucket: int) -> Tensor: ...

    def spoil(self) -> None: ...


def judge(x: Rows, y: Tensor, bucket: int, eager: Run, replay: Run) -> None:
    """Errors: BackendError naming the first element in which a replay differs from the eager run.

    Each replay reads rows that were not there at the capture, over an output that was overwritten.
    """
    rows = x.rows(bucket)
    sample = sample_rows(bucket, x.k_pad, x.k_pad, rows.device)
    m = bucket - max(1, bucket // 4) if bucket > 1 else 1
    first: Tensor | None = None
    for number in range(REPLAYS):
        poison = POISONS[number % len(POISONS)]
        sign = 1 if number < REPLAYS // 2 else -1
        torch.mul(sample, sign, out=rows)
        rows[m:] = poison
        expected = _bits(eager, y)
        y.fill_(UNWRITTEN)
        got = _bits(replay, y)
        _refuse_difference(got, expected, f"replay {number + 1}, rows from {m} on {poison}")
        if sign > 0:
            first = expected[:m] if first is None else first
            _refuse_difference(expected[:m], first, f"eager run {number + 1}, rows from {m} on {poison}")
    rows.zero_()
    x.spoil()


def _bits(run: Run, y: Tensor) -> Tensor:
    run()
    return y.view(torch.int16).clone()


def _refuse_difference(got: Tensor, expected: Tensor, what: str) -> None:
    different = got != expected
    count = int(different.sum())
    if count:
        row, column = different.nonzero()[0].tolist()
        raise BackendError(
            f"{what}: {count} elements differ, the first at [{row}, {column}]: the graph does not compute "
            "what the calls do"
        )
