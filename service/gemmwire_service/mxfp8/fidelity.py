"""How much of numbers is left after a round trip through MXFP8: sums and counts that add up over tiles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from .format import BLOCK, E4M3_MAX, dequantize, power
from .weight import MxWeight

SAMPLE = 1 << 17  # elements that are looked at where it must cost next to nothing
_SMALLEST_NORMAL = 0x08  # as a code without its sign; those from 1 up to it are subnormal


@dataclass(frozen=True)
class Fidelity:
    """Of `rows` rows, `elements` elements in all.

    signal: the sum of x^2; noise: that of (x - x')^2, x' the dequantized x; both in float64.
    saturated: elements whose magnitude is above 448 * 2^(s-127), the largest that their block's scale byte s
    lets a code stand for: none under this project's scale rule. flushed: those that are not zero and whose
    code is. subnormal: those whose code has exponent 0 and is not zero: 1 to 3 bits are left of them, not 4.
    """

    rows: int = 0
    elements: int = 0
    signal: float = 0.0
    noise: float = 0.0
    zeros: int = 0
    saturated: int = 0
    flushed: int = 0
    subnormal: int = 0

    @classmethod
    def of(cls, x: Tensor, codes: Tensor, scales: Tensor, served: Tensor | None = None) -> Fidelity:
        """x: finite floats [m, k]; codes: float8_e4m3fn [m, k_pad]; scales: uint8 [m, k_pad/32];
        served: float64 [m, k], what codes and scales stand for, if that is known already."""
        k = x.shape[1]
        exact = x.double()
        stands = dequantize(codes, scales, torch.float64)[:, :k] if served is None else served
        magnitude = codes.view(torch.uint8)[:, :k] & 0x7F
        zeros, coded_zero = exact == 0, magnitude == 0
        all_coded_zero = _count(coded_zero)
        return cls(
            rows=len(x),
            elements=x.numel(),
            signal=_squares(exact),
            noise=_squares(exact - stands),
            zeros=_count(zeros),
            saturated=_saturated(exact, scales),
            flushed=_count(coded_zero & ~zeros),
            subnormal=_count(magnitude < _SMALLEST_NORMAL) - all_coded_zero,
        )

    @classmethod
    def sample(cls, weight: Tensor, mx: MxWeight) -> Fidelity:
        """Of evenly spaced rows of a float weight [n, k] and what it became: SAMPLE elements, or all."""
        count = min(mx.n, max(1, SAMPLE // mx.k))
        if count == mx.n:
            return cls.of(weight, mx.codes, mx.scales)
        rows = torch.linspace(0, mx.n - 1, count).round().long()
        codes = mx.codes.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return cls.of(weight[rows], codes, mx.scales[rows])

    @classmethod
    def total(cls, parts: Iterable[Fidelity]) -> Fidelity:
        return cls(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))

    @property
    def relative_error(self) -> float:
        """||x - x'|| / ||x||: 0 where nothing is lost, of zeros too; Infinity where zeros became more."""
        return relative(self.noise, self.signal)

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise) in dB; None where nothing is lost, which has no number of dB."""
        if not self.noise:
            return None
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    def figures(self) -> dict[str, float | None]:
        """`sqnr_db` and `relative_error`, and of each count its share of all elements."""
        return {
            "sqnr_db": self.sqnr_db,
            "relative_error": self.relative_error,
            "zeros": self.share(self.zeros),
            "saturated": self.share(self.saturated),
            "flushed": self.share(self.flushed),
            "subnormal": self.share(self.subnormal),
        }

    def share(self, count: int) -> float:
        return count / self.elements if self.elements else 0.0


def by_block(matrix: Tensor) -> Tensor:
    """[m, k] -> [m, blocks, 32], the last block filled up with zeros."""
    missing = -matrix.shape[1] % BLOCK
    padded = torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix
    return padded.reshape(len(matrix), -1, BLOCK)


def _saturated(exact: Tensor, scales: Tensor) -> int:
    blocks, largest = by_block(exact), power(scales).double() * E4M3_MAX
    if not (torch.linalg.vector_norm(blocks, float("inf"), dim=2) > largest).any():
        return 0
    return _count(blocks.abs() > largest[:, :, None])


def _squares(numbers: Tensor) -> float:
    """Their sum; no square is kept."""
    flat = numbers.reshape(-1)
    return float(torch.dot(flat, flat))


def _count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))


def relative(noise: float, signal: float) -> float:
    """The root of noise / signal, sums of squares; 0 / 0 is 0."""
    if not noise:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf


def relative_errors(noise: Tensor, signal: Tensor) -> Tensor:
    """Roots of noise / signal, both float64 sums of squares: 0 / 0 is 0, and anything else / 0 Infinity."""
    return torch.where(noise == 0, 0.0, (noise / signal).sqrt())
