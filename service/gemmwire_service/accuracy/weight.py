"""What MXFP8 makes of a weight: its error as a whole, by row and by block, and what its numbers are like."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmwire_service.mxfp8.fidelity import Fidelity, by_block, relative_errors
from gemmwire_service.mxfp8.format import BLOCK

from .ranking import WORST, Spread, worst
from .tile import Tile

_BIAS = 127  # of E8M0


@dataclass(frozen=True)
class WorstBlock:
    """The block of row `row` that begins at column `column`; its scale is 2^exponent."""

    row: int
    column: int
    exponent: int
    relative_error: float


@dataclass(frozen=True)
class WeightFigures:
    """kurtosis: m4 / m2^2 of the elements, 3 where they are normally distributed; None where they are all one
    number. channels: relative errors of the rows of W, which are the layer's output features. exponents: how
    many blocks have the scale 2^e, for each e; blocks under scale byte 0, whose codes are all zero unless
    another library made them, are `zero_blocks`. zero_rows: rows of W without anything but zeros."""

    fidelity: Fidelity
    largest: float
    kurtosis: float | None
    zero_rows: int
    zero_blocks: int
    exponents: dict[int, int]
    channels: Spread
    worst_channels: list[tuple[int, float]]
    worst_blocks: list[WorstBlock]


class WeightMeter:
    """Takes the tiles of a weight in order."""

    def __init__(self, mean: float) -> None:
        self._mean = mean
        self._fidelity: list[Fidelity] = []
        self._noise: list[Tensor] = []
        self._signal: list[Tensor] = []
        self._second = self._fourth = 0.0  # sums of powers of what is left without the mean
        self._least, self._most = float("inf"), float("-inf")
        self._exponents: Counter[int] = Counter()
        self._blocks: list[WorstBlock] = []

    def add(self, tile: Tile) -> None:
        self._fidelity.append(Fidelity.of(tile.exact, tile.codes, tile.scales, tile.served))
        noise, signal = _squares(tile.exact - tile.served), _squares(tile.exact)
        self._noise.append(noise.sum(1))
        self._signal.append(signal.sum(1))
        square = (tile.exact - self._mean).square_().view(-1)
        self._second += float(square.sum())
        self._fourth += float(torch.dot(square, square))
        least, most = torch.aminmax(tile.exact)
        self._least, self._most = min(self._least, float(least)), max(self._most, float(most))
        counts = torch.bincount(tile.scales.reshape(-1).int(), minlength=256)
        self._exponents.update({int(byte) - _BIAS: int(counts[byte]) for byte in counts.nonzero().flatten()})
        self._add_blocks(tile, relative_errors(noise, signal))

    def figures(self) -> WeightFigures:
        fidelity = Fidelity.total(self._fidelity)
        signal = torch.cat(self._signal)
        errors = relative_errors(torch.cat(self._noise), signal)
        exponents = dict(sorted(self._exponents.items()))
        return WeightFigures(
            fidelity=fidelity,
            largest=max(abs(self._least), abs(self._most)),
            kurtosis=self._kurtosis(fidelity.elements),
            zero_rows=int((signal == 0).sum()),
            zero_blocks=exponents.pop(-_BIAS, 0),
            exponents=exponents,
            channels=Spread.of(errors, signal),
            worst_channels=worst(errors),
            worst_blocks=self._blocks,
        )

    def _kurtosis(self, elements: int) -> float | None:
        if self._least == self._most or not self._second:
            return None
        return elements * self._fourth / self._second**2

    def _add_blocks(self, tile: Tile, errors: Tensor) -> None:
        columns = errors.shape[1]
        found = [
            WorstBlock(
                row=tile.start + place // columns,
                column=place % columns * BLOCK,
                exponent=int(tile.scales.view(-1)[place]) - _BIAS,
                relative_error=value,
            )
            for place, value in worst(errors.reshape(-1))
        ]
        # Those of earlier tiles come first among equals.
        self._blocks = sorted(self._blocks + found, key=lambda block: -block.relative_error)[:WORST]


def mean_of(weight: Tensor, step: int = 1 << 18) -> float:
    """Of all elements, summed in float64; no copy of the weight in float64 is made."""
    return sum(float(part.double().sum()) for part in weight.reshape(-1).split(step)) / weight.numel()


def _squares(matrix: Tensor) -> Tensor:
    """Their sums, float64 [r, blocks]."""
    norms: Tensor = torch.linalg.vector_norm(by_block(matrix), dim=2)
    return norms.square_()
