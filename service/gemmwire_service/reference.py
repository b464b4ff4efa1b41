"""A forward held against emulation of the same bucket, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .backends.base import Plan
from .backends.emulation import Emulation
from .errors import BackendError
from .mxfp8.fidelity import relative_errors
from .mxfp8.weight import MxWeight

TOLERANCE = 2.0**-6
"""Rounding to BF16 is off by up to 2^-8 of a number. Emulation rounds y; a backend may round x @ W.T, then y.
With |x @ W.T| <= |y| + |b| the two differ by up to 2^-8 (3|y| + |b|), below 2^-6 of sqrt(y^2 + b^2)."""
_COLUMN_ROWS = 8  # from so many rows on, a whole column does not cancel by chance
_ELEMENTS = 1 << 22  # of a weight that are dequantized at one time, and of an output that are compared


class Reference:
    """The layer's weight on `device`, dequantized a few output columns at a time."""

    def __init__(self, weight: MxWeight, device: torch.device) -> None:
        bias = None if weight.bias is None else weight.bias.to(device)
        self._weight = replace(
            weight, codes=weight.codes.to(device), scales=weight.scales.to(device), bias=bias
        )
        self._bias = torch.zeros(weight.n, device=device) if bias is None else bias
        self._device = device
        self._emulation = Emulation()

    def check(self, x: Tensor, y: Tensor) -> float:
        """x: BF16 [bucket, at least k_pad], y: BF16 [bucket, n] -> the largest relative error of a row.

        The error of a row is ||y - e|| / ||(e, bias)||, so that a bias which cancels x @ W.T does not magnify
        its rounding. From 8 rows on columns are checked too, which shows one wrong row of a large weight.
        Errors: BackendError naming the row or column beyond TOLERANCE, or a row of x with a NaN or Inf for
        which y is not NaN throughout.
        """
        finite = x.isfinite().all(dim=1)
        self._check_nan_rows(y, finite)
        error = torch.zeros(len(x), dtype=torch.float64, device=self._device)
        size = torch.zeros_like(error)
        for columns, expected in self._emulate(x):
            wrong = (y[:, columns].double() - expected)[finite].square()
            right = expected[finite].square() + self._bias[columns].double().square()
            error[finite] += wrong.sum(dim=1)
            size[finite] += right.sum(dim=1)
            if int(finite.sum()) >= _COLUMN_ROWS:
                _check(wrong.sum(dim=0), right.sum(dim=0), "column", columns.start)
        return _check(error, size, "row")

    def _check_nan_rows(self, y: Tensor, finite: Tensor) -> None:
        wrong = ~y.isnan().all(dim=1) & ~finite
        if wrong.any():
            raise BackendError(
                f"row {int(wrong.nonzero()[0])} of x has a NaN or Inf, and y is not NaN throughout that row"
            )

    def _emulate(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some columns and their float64 [bucket, columns], until all are covered."""
        weight, bucket = self._weight, len(x)
        step = max(1, _ELEMENTS // max(weight.k_pad, bucket))
        operand = x[:, : weight.k_pad].contiguous()
        for start in range(0, weight.n, step):
            columns = slice(start, min(start + step, weight.n))
            part = MxWeight(
                weight.codes[columns],
                weight.scales[columns],
                None if weight.bias is None else weight.bias[columns],
                weight.k,
            )
            prepared = self._emulation.prepare(part, self._device)
            out = torch.empty(bucket, prepared.n_pad, dtype=torch.bfloat16, device=self._device)
            self._emulation.forward(operand, prepared, Plan(bucket), out)
            yield columns, out[:, : prepared.n].double()


def _check(wrong: Tensor, right: Tensor, what: str, first: int = 0) -> float:
    """Sums of squares -> the largest relative error."""
    errors = relative_errors(wrong, right).nan_to_num(nan=torch.inf, posinf=torch.inf)
    worst = int(errors.argmax())
    value = float(errors[worst])
    if value > TOLERANCE:
        raise BackendError(
            f"{what} {first + worst} is {value:.3g} off emulation, relative to its norm; at most "
            f"{TOLERANCE:.3g} is right",
            expected=TOLERANCE,
            got=value,
        )
    return value
