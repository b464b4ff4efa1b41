"""Relative errors of many rows in a few numbers, and the worst of them by their place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

WORST = 8  # rows or blocks that are named


@dataclass(frozen=True)
class Spread:
    """Quantiles of the relative errors of rows, by nearest rank: each is the error of some row. Rows of zeros
    that stay zeros, such as padding, are not counted: they would hide what happens to the others."""

    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, errors: Tensor, signal: Tensor) -> Spread:
        """errors: float64 [m]; signal: what they are relative to. All 0 where no row is left."""
        ranked = errors[(signal > 0) | (errors > 0)].sort().values
        if not len(ranked):
            return cls(0.0, 0.0, 0.0)
        return cls(*(float(ranked[math.ceil(share * len(ranked)) - 1]) for share in (0.5, 0.99, 1.0)))


def worst(errors: Tensor) -> list[tuple[int, float]]:
    """Place and error of the few largest, the largest first, the first of equals before; none that is 0."""
    order = errors.argsort(descending=True, stable=True)[:WORST]
    return [(int(place), float(errors[place])) for place in order if errors[place] > 0]
