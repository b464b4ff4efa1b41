"""How far a layer's answers are from those of the unquantized layer, row by row of x."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemmwire_service.mxfp8.fidelity import Fidelity, relative, relative_errors
from gemmwire_service.mxfp8.format import BLOCK, dequantize, quantize

from .inputs import Rows
from .ranking import Spread, worst
from .tile import Tile


@dataclass(frozen=True)
class OutputFigures:
    """Errors are ||y' - y|| / ||y||: `row_error` of single rows; `relative_error` over all of them, which a
    few with a large y decide.

    y = x @ W.T of the unquantized x and weight; y' of x and weight in MXFP8, x by way of BF16 as it is
    served; both in float64, without the bias, which is not quantized. weight_only: over all rows, with x as
    it was given: what of the error would stay if x were not quantized. x: of x itself. zero_rows: rows of y
    without anything but zeros.
    """

    rows: int
    row_error: Spread
    relative_error: float
    weight_only: float
    worst_rows: list[tuple[int, float]]
    zero_rows: int
    x: Fidelity
    x_largest: float


class OutputMeter:
    """Takes the tiles of the weight."""

    def __init__(self, rows: Rows) -> None:
        x, self._numbers = rows.x, rows.numbers
        self._exact = x.double()
        rounded = torch.nn.functional.pad(x.bfloat16(), (0, -x.shape[1] % BLOCK))
        codes, scales = quantize(rounded)
        self._served = dequantize(codes, scales, torch.float64)[:, : x.shape[1]]
        self._fidelity = Fidelity.of(x, codes, scales, self._served)
        self._noise, self._alone, self._signal = torch.zeros(3, len(x), dtype=torch.float64)

    def add(self, tile: Tile) -> None:
        y = self._exact @ tile.exact.T
        self._signal += y.square().sum(1)
        self._noise += (self._served @ tile.served.T - y).square_().sum(1)
        self._alone += (self._exact @ tile.served.T - y).square_().sum(1)

    def figures(self) -> OutputFigures:
        errors = relative_errors(self._noise, self._signal)
        signal = float(self._signal.sum())
        return OutputFigures(
            rows=len(errors),
            row_error=Spread.of(errors, self._signal),
            relative_error=relative(float(self._noise.sum()), signal),
            weight_only=relative(float(self._alone.sum()), signal),
            worst_rows=[(self._numbers[row], error) for row, error in worst(errors)],
            zero_rows=int((self._signal == 0).sum()),
            x=self._fidelity,
            x_largest=float(self._exact.abs().max()),
        )
