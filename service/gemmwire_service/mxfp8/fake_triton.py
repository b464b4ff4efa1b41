"""Fake quantization on a GPU in one pass: the arithmetic of fake.py, one program a row and stretch of blocks.

Triton is imported with this module; fake.py imports it where x is on a GPU. Every product is exact (by powers
of two), so that it does not matter which of them the compiler fuses with a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32  # of 32 elements, that one program rounds


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def fake_quantize_kernel(x, out, k, x_stride, out_stride, blocks: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """x, out: BF16 [m, k] with these row strides; grid (m, blocks of k / `blocks`)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * blocks * 32 + tl.arange(0, blocks * 32)
    inside = column < k
    # x is not read again, and out by the matmul at once: the L2 cache should give up the one for the other.
    source = tl.load(x + row * x_stride + column, mask=inside, other=0.0, eviction_policy="evict_first")
    bits = source.to(tl.int16, bitcast=True).to(tl.int32)
    magnitude_bits = (bits & 0x7FFF) << 16
    amax = tl.max(tl.reshape(magnitude_bits, (blocks, 32)), axis=1)
    # ceil(log2(amax / 448)) from the bits of a BF16 amax; fake.py has the derivation.
    scale_bits = tl.maximum(amax + ((31 << 16) - (8 << 23)), 0) & 0x7F800000
    inverse = ((254 << 23) - scale_bits).to(tl.float32, bitcast=True)
    scale = scale_bits.to(tl.float32, bitcast=True)
    magnitude = tl.reshape(magnitude_bits.to(tl.float32, bitcast=True), (blocks, 32))
    value = magnitude * inverse[:, None]
    step = tl.maximum(value, 0.015625) * 1048576.0
    rounded = ((value + step) - step) * scale[:, None]
    result = tl.reshape(rounded, (blocks * 32,)).to(tl.bfloat16).to(tl.int16, bitcast=True)
    signed = (result | (bits & 0x8000).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    tl.store(out + row * out_stride + column, signed, mask=inside, eviction_policy="evict_last")


def fake_quantize(x: Tensor, out: Tensor) -> None:
    """out = dequantize(*quantize(x)) to the bit, but NaN where x is NaN or Inf.

    x, out: BF16 [m, K] on a GPU, rows contiguous, K a multiple of 32; no allocation and no synchronisation.
    """
    m, k = x.shape
    if k % 32 or out.shape != x.shape:  # it would write beyond its end
        raise ValueError(f"x is {[m, k]} and out {list(out.shape)}: K has to be a multiple of 32 in both")
    grid = (m, triton.cdiv(k, BLOCKS * 32))
    with torch.cuda.device(x.device):
        fake_quantize_kernel[grid](x, out, k, x.stride(0), out.stride(0), BLOCKS)
