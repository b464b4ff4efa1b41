"""Quantizing to MXFP8 and back, bit-exact with FlashInfer's CUDA quantizer.

A block is 32 neighbours along K. Its scale byte s stands for 2^(s-127), with

    s = ceil(log2(amax / 448)) + 127, at least 0 and at most 254

(448 is the largest E4M3 number, so a finite block never saturates), and each element becomes the E4M3 number
nearest to x / 2^(s-127), ties to even. docs/numerics.md has the ends of the range, NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 32
E4M3_MAX = 448.0
SCALE_MAX = 254  # 255 is the NaN of E8M0
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# Blocks worked on at once: few enough that the FP32 temporaries of a large weight stay small (2 MB each), and
# enough for every core of a large host: on 15 threads 4096x4096 takes 22 ms, and 76 in tiles of a quarter.
_TILE = 16384
# The kernel multiplies by the FP32 reciprocal; dividing would differ for FP32 amax near the smallest scale.
_RECIPROCAL_MAX = torch.tensor(1 / E4M3_MAX, dtype=torch.float32).item()


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The E4M3 codes and E8M0 scale bytes of x.

    x: BF16, FP16 or FP32 [..., K], K a multiple of 32, on any device. FP32 is quantized as it is, not by way
    of BF16.
    Returns float8_e4m3fn [..., K] and uint8 [..., K/32].

    What the kernel does to non-finite elements is kept: a NaN does not count for amax and becomes +448; a
    block that holds an Inf gets scale byte 254, each Inf becomes +448 whatever its sign and each finite
    element 0.
    Raises TypeError for another dtype, ValueError for another K.
    """
    if x.dtype not in FLOATS:
        raise TypeError(
            f"x is {x.dtype}: quantize takes bfloat16, float16 or float32; convert x to one of them"
        )
    _check_k(x)
    blocks = x.detach().reshape(-1, BLOCK)
    codes = torch.empty(blocks.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(blocks), dtype=torch.uint8, device=x.device)
    for tile in _tiles(len(blocks)):
        codes[tile], scales[tile] = _quantize_blocks(blocks[tile].to(torch.float32, copy=True))
    return codes.view(x.shape), scales.view(*x.shape[:-1], x.shape[-1] // BLOCK)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes and scales stand for.

    codes: float8_e4m3fn [..., K]; scales: uint8 [..., K/32]. Returns dtype [..., K], computed in FP32 and
    rounded once, hence exact in FP32 and BF16 where the number is in their normal range; float64 is exact
    throughout. Scale byte 255 gives NaN. Raises TypeError for other dtypes, ValueError where the shapes do
    not belong together.
    """
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise TypeError(
            f"codes are {codes.dtype} and scales {scales.dtype}: dequantize takes float8_e4m3fn and uint8; "
            "reinterpret bytes with .view(dtype), never .to(dtype)"
        )
    _check_k(codes)
    needed = (*codes.shape[:-1], codes.shape[-1] // BLOCK)
    if scales.shape != needed:
        raise ValueError(f"scales are {list(scales.shape)}: codes {list(codes.shape)} need {list(needed)}")
    work = torch.float64 if dtype == torch.float64 else torch.float32
    blocks, flat = codes.reshape(-1, BLOCK), scales.reshape(-1, 1)
    out = torch.empty(blocks.shape, dtype=dtype, device=codes.device)
    for tile in _tiles(len(blocks)):
        out[tile] = blocks[tile].to(work).mul_(power(flat[tile]).to(work))
    return out.view(codes.shape)


def _check_k(x: Tensor) -> None:
    if x.ndim < 1 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"a tensor of shape {list(x.shape)} does not split into blocks: its last dimension has to be a "
            f"multiple of {BLOCK}; pad it with zeros"
        )


def _tiles(blocks: int) -> Iterator[slice]:
    return (slice(start, start + _TILE) for start in range(0, blocks, _TILE))


def _quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: FP32 [blocks, 32], overwritten. Returns codes [blocks, 32] and scale bytes uint8 [blocks]."""
    amax = torch.where(x.isnan(), 0.0, x.abs()).amax(-1)
    scales = _scale_byte(amax)
    x.mul_(_inverse_power(scales)[:, None])
    x.nan_to_num_(nan=E4M3_MAX).clamp_(-E4M3_MAX, E4M3_MAX)  # older casts turn what is above 448 into NaN
    return x.to(torch.float8_e4m3fn), scales.to(torch.uint8)


def _scale_byte(amax: Tensor) -> Tensor:
    """FP32 [blocks] -> int32 [blocks]: the exponent field of amax / 448, rounded up.

    A subnormal amax / 448 has exponent field 0, which stands for 2^-127: it is rounded up to 1 above that.
    """
    bits = (amax * _RECIPROCAL_MAX).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    above = torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
    return (exponent + above).clamp_(max=SCALE_MAX)


def _inverse_power(scales: Tensor) -> Tensor:
    """FP32 2^(127-s), except 0 at both ends of the range, as in the kernel: there the elements become 0."""
    inner = (scales > 0) & (scales < SCALE_MAX)
    return ((SCALE_MAX - scales) << 23).mul_(inner).view(torch.float32)


def power(scales: Tensor) -> Tensor:
    """FP32 2^(s-127) of uint8 s: byte 0 is the subnormal 2^-127, byte 255 NaN."""
    bits = scales.to(torch.int32) << 23
    return (
        bits.masked_fill_(scales == 0, 0x400000).masked_fill_(scales == 255, 0x7FC00000).view(torch.float32)
    )
