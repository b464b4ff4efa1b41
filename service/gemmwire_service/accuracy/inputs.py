"""Rows of x to measure a layer with that nobody captured: drawn, and the same at every run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

CHANNELS = 128  # of K, one is an outlier, and at least one
EXPONENTS = (4, 10)  # an outlier channel is larger by 2^4 to 2^10, both ends included


@dataclass(frozen=True, eq=False)
class Rows:
    """x: finite BF16, F16 or F32 [m, K]; numbers: of each row, where it stands in what it is from."""

    x: Tensor
    numbers: Sequence[int]

    @classmethod
    def whole(cls, x: Tensor) -> Rows:
        return cls(x, range(len(x)))


def gaussian(rows: int, k: int, generator: Generator) -> Tensor:
    """BF16 [rows, K] of N(0, 1)."""
    return torch.randn(rows, k, generator=generator).bfloat16()


def outliers(rows: int, k: int, generator: Generator) -> Tensor:
    """BF16 [rows, K] of N(0, 1) in which one channel of 128 is larger by a power of two, in all rows alike.

    So large language models are: a few channels, always the same, are 20 to 1000 times as large as the others
    (LLM.int8(), arXiv:2208.07339; Massive Activations in Large Language Models, arXiv:2402.17762).
    """
    x = gaussian(rows, k, generator)
    chosen = torch.randperm(k, generator=generator)[: max(1, k // CHANNELS)]
    exponents = torch.randint(EXPONENTS[0], EXPONENTS[1] + 1, chosen.shape, generator=generator)
    x[:, chosen] *= torch.ldexp(torch.ones(len(chosen)), exponents).bfloat16()
    return x


Draw = Callable[[int, int, Generator], Tensor]
SYNTHETIC: Mapping[str, Draw] = {"gaussian": gaussian, "outliers": outliers}
CAPTURED = "captured"


def synthetic(layer: str, rows: int, k: int, seed: int) -> dict[str, Rows]:
    """x BF16 [rows, K] of each kind: of a layer, they follow from its name, K and the seed alone."""
    made = {}
    for kind, draw in SYNTHETIC.items():
        generator = Generator().manual_seed(zlib.crc32(f"{seed}:{kind}:{layer}:{k}".encode()))
        made[kind] = Rows.whole(draw(rows, k, generator))
    return made
