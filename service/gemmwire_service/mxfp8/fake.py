"""Fake quantization: x rounded to what its MXFP8 form stands for, in BF16, without making that form.

This is the hot path of a forward, so it is one pass where it can be: a kernel of Triton's on a GPU, and a C
function on a CPU, where there is a compiler. Elsewhere it is few passes of torch's operators without
allocation, against which the C function is checked when it is loaded. How a tile is rounded:

1. The scale 2^(s-127) of a block follows from the bits of its amax. For a BF16 amax with exponent field e and
   mantissa field f (7 bits), s = e - 8 + (f > 96), because 448 is 1.75 * 2^8 and 1 + 96/128 is 1.75. Adding
   31 to the mantissa field carries into the exponent field exactly if f > 96.
2. Each magnitude is divided by its scale in FP32, which is exact.
3. It is rounded to E4M3 by adding and subtracting 2^20 * step, where step = max(magnitude, 2^-6). The sum has
   an ulp of 2^(E-3), where E is the exponent of step: the spacing of normal E4M3 numbers at E, and 2^-9, the
   spacing of the subnormal ones, below 2^-6. Since a BF16 magnitude has 8 significant bits, the sum does not
   reach the next power of two, and 2^20 * step is an even multiple of the ulp, so that ties go to even.
4. It is multiplied by its scale and takes the sign of x, that of a zero too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from gemmwire_service.cache import cache_folder
from gemmwire_service.compiled import NotCompiled
from gemmwire_service.mxfp8.fake_cpu import Quantize, fake_cpu
from gemmwire_service.mxfp8.few_rows import FewRows, few_rows
from gemmwire_service.mxfp8.format import BLOCK

log = logging.getLogger("gemmwire.mxfp8")

_TILE = 1 << 17  # elements rounded at once: the FP32 buffers of a tile fit into the L2 cache of a core
_SMALLEST_NORMAL = 2.0**-6  # of E4M3
_SHIFT = 1 << 20

# Tensors, because a Python number costs each operation a microsecond more.
_MAGNITUDE = torch.tensor(0x7FFF, dtype=torch.int16)
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_ROUND_UP = torch.tensor((31 << 16) - (8 << 23), dtype=torch.int32)
_TWICE_BIAS = torch.tensor(254 << 23, dtype=torch.int32)


def fake_quantize(x: Tensor, out: Tensor, workspace: Workspace | None = None) -> None:
    """out = dequantize(*quantize(x)) to the bit, but NaN where x is NaN or Inf.

    x, out: BF16 [m, K], K a multiple of 32; out may be a strided slice. A magnitude that rounds to 2^128
    becomes Inf. The NaN is what keeps a non-finite row apart: every dot product over the row is then NaN.
    `workspace`, of this K and device, saves the allocations. Raises TypeError for other dtypes.
    """
    if x.dtype != torch.bfloat16 or out.dtype != torch.bfloat16:
        raise TypeError(f"x is {x.dtype} and out {out.dtype}: both have to be bfloat16")
    rows = x.stride(1) == out.stride(1) == 1
    if rows and x.is_cuda and out.is_cuda and (fused := _fused()) is not None:
        fused(x, out)
        return
    if rows and x.is_cpu and out.is_cpu and (compiled := _native.quantize) is not None:
        compiled(x, out)
        return
    round_by_operators(x, out, workspace)


def round_by_operators(x: Tensor, out: Tensor, workspace: Workspace | None = None) -> None:
    """The same on any device by torch's operators."""
    if workspace is None:
        workspace = Workspace(x.shape[0], x.shape[1], x.device)
    if x.shape[0] <= workspace.rows:  # a small x is one tile, and splitting it costs as much as rounding it
        _round_tile(x, out, workspace.tile(x.shape[0]))
        return
    for source, target in zip(torch.split(x, workspace.rows), torch.split(out, workspace.rows), strict=True):
        _round_tile(source, target, workspace.tile(source.shape[0]))


@cache
def _fused() -> Callable[[Tensor, Tensor], None] | None:
    """The same in one kernel for a GPU, where Triton is installed, as it is with torch's CUDA builds."""
    try:
        from gemmwire_service.mxfp8.fake_triton import fake_quantize as fused
    except ImportError as error:
        log.warning("x is quantized by a dozen kernels instead of one: Triton cannot be imported (%s)", error)
        return None
    return fused


@dataclass
class _Native:
    """What is compiled for a CPU at its first use, and kept in a folder."""

    folder: Path | None = field(default_factory=cache_folder)

    @cached_property
    def quantize(self) -> Quantize | None:
        try:
            compiled = fake_cpu(self.folder)
        except (NotCompiled, OSError) as error:
            log.warning(
                "x is quantized by 14 operators of torch, to the same bits as in C but slower: %s", error
            )
            return None
        if not _same_bits(compiled):
            log.error("x is quantized by torch's operators: the compiled function gives other bits")
            return None
        return compiled

    @cached_property
    def few_rows(self) -> FewRows | None:
        try:
            return few_rows(self.folder)
        except (NotCompiled, OSError) as error:
            log.warning("few rows are multiplied by torch, slower than by the function in C: %s", error)
            return None


_native = _Native()


def few_rows_here() -> FewRows | None:
    """The matmul for few rows of a CPU, where it has one."""
    return _native.few_rows


def keep_compiled_in(folder: Path | None) -> None:
    """Say where, before the first use; else it is the user's cache folder."""
    _native.folder = folder


def _same_bits(compiled: Quantize) -> bool:
    """Whether it agrees with the operators: on every BF16 among its like, and as the largest of a block that
    goes down to what is flushed, to what is subnormal in E4M3, or as far as all are normal."""
    every = torch.arange(1 << 16, dtype=torch.int32).view(-1, BLOCK)
    largest = torch.arange(1 << 15, dtype=torch.int32)[:, None]
    down = torch.arange(BLOCK, dtype=torch.int32)
    # In steps of so many 128ths of an exponent.
    blocks = [every, *((largest - down * step).clamp_min_(0) for step in (73, 62, 55))]
    for bits in blocks + [-1 - each for each in blocks[1:]]:
        x = bits.to(torch.int16).view(torch.bfloat16).view(-1, 8 * BLOCK)
        expected, out = torch.empty_like(x), torch.empty_like(x)
        round_by_operators(x, expected)
        compiled(x, out)
        same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
        if not bool(same.all()):
            return False
    return True


class Workspace:
    """The buffers of fake_quantize for m rows of K, which it works through in tiles of `rows` rows.

    For one call at a time. Raises ValueError unless K is a positive multiple of 32.
    """

    def __init__(self, m: int, k: int, device: torch.device) -> None:
        if k < 1 or k % BLOCK:
            raise ValueError(
                f"K={k} does not split into blocks: a multiple of {BLOCK} is needed; pad with zeros"
            )
        self.rows = max(1, min(m, _TILE // k))
        self._whole = _Tile.allocate(self.rows, k, device)
        self._tiles = {self.rows: self._whole}

    def tile(self, rows: int) -> _Tile:
        """The buffers of the first `rows` rows, at most `self.rows`."""
        if rows not in self._tiles:
            self._tiles[rows] = self._whole.head(rows)
        return self._tiles[rows]


@dataclass(frozen=True, eq=False)
class _Tile:
    """The buffers of a tile, and each view of them that would otherwise be made anew on every call."""

    magnitude: Tensor  # BF16 [rows, K]
    value: Tensor  # FP32 [rows, K]
    step: Tensor  # FP32 [rows, K]
    scale: Tensor  # FP32 [rows, K/32, 1], as is inverse
    inverse: Tensor
    magnitude_bits: Tensor  # the same memory as int16, int32 ...
    scale_bits: Tensor
    inverse_bits: Tensor
    blocks: Tensor  # ... and value as [rows, K/32, 32]
    blocks_bits: Tensor

    @classmethod
    def allocate(cls, rows: int, k: int, device: torch.device) -> _Tile:
        value, step = torch.empty(2, rows, k, device=device).unbind()
        scale, inverse = torch.empty(2, rows, k // BLOCK, 1, device=device).unbind()
        return cls.over(
            torch.empty(rows, k, dtype=torch.bfloat16, device=device), value, step, scale, inverse
        )

    @classmethod
    def over(cls, magnitude: Tensor, value: Tensor, step: Tensor, scale: Tensor, inverse: Tensor) -> _Tile:
        blocks = value.view(*scale.shape[:2], BLOCK)
        integers = (magnitude.view(torch.int16), scale.view(torch.int32), inverse.view(torch.int32))
        return cls(magnitude, value, step, scale, inverse, *integers, blocks, blocks.view(torch.int32))

    def head(self, rows: int) -> _Tile:
        whole = (self.magnitude, self.value, self.step, self.scale, self.inverse)
        return self.over(*(buffer[:rows] for buffer in whole))


def _round_tile(x: Tensor, out: Tensor, tile: _Tile) -> None:
    """x, out: BF16 [rows, K]. The numbers are the steps of the module's docstring."""
    torch.bitwise_and(x.view(torch.int16), _MAGNITUDE, out=tile.magnitude_bits)
    tile.value.copy_(tile.magnitude)
    # 1. Positive floats order as their bits do, and the bits of a NaN are the largest.
    torch.amax(tile.blocks_bits, -1, keepdim=True, out=tile.scale_bits)
    tile.scale_bits.add_(_ROUND_UP).clamp_min_(0).bitwise_and_(_EXPONENT)
    # Scale byte 0 is scale 0.0 here: a block that small rounds to 0 altogether.
    torch.sub(_TWICE_BIAS, tile.scale_bits, out=tile.inverse_bits)
    tile.blocks.mul_(tile.inverse)  # 2.
    torch.clamp(tile.value, min=_SMALLEST_NORMAL, out=tile.step)  # 3.
    tile.value.add_(tile.step, alpha=_SHIFT).sub_(tile.step, alpha=_SHIFT)
    tile.blocks.mul_(tile.scale)  # 4.
    tile.magnitude.copy_(tile.value)
    torch.copysign(tile.magnitude, x, out=out)
