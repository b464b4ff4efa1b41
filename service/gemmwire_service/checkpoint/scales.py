"""The scales of a weight as a checkpoint stores them, and as MXFP8 has them: uint8 [N, ceil(K/32)], linear.

Three differences are undone, each only where the config declares the scheme: padding is cut off, the scale of
a block of rows and columns is repeated, and an F32 scale that is a power of two becomes its exponent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemmwire_service.checkpoint.base import shown
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.checkpoint.schemes import Scheme
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK

E8M0 = ("U8", "F8_E8M0")  # two names of one thing: exponents in a byte
_BIAS = 127


def blocks(n: int, k: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight [n, k]."""
    return -(-n // block[0]), -(-k // block[1])


def check_scale(scale: TensorInfo, weight: TensorInfo, scheme: Scheme, source: object) -> None:
    """Raises CheckpointError unless `scale` can be the scales of `weight`, by its dtype and shape."""
    where = f"{source}: tensor {shown(scale.name)}"
    dtypes = (*E8M0, "F32") if scheme.float_scales else E8M0
    if scale.dtype not in dtypes:
        raise CheckpointError(
            f"{where} is {scale}; the scales of MXFP8 are E8M0 exponents stored as {' or '.join(E8M0)}. "
            "A float scale is another format: serve the unquantized model instead",
            expected=dtypes,
            got=scale.dtype,
        )
    needed = blocks(weight.shape[0], weight.shape[1], scheme.block)
    if scale.shape == needed or (_may_be_padded(scheme) and _covers(scale.shape, needed)):
        return
    per = f"{BLOCK} along the last dimension" if scheme.block[0] == 1 else f"block of {list(scheme.block)}"
    raise CheckpointError(
        f"{where} is {scale}, and {shown(weight.name)} is {weight}: needs {list(needed)}, one scale per {per}"
        + _hint(scheme, scale.shape, needed),
        expected=list(needed),
        got=list(scale.shape),
    )


def to_linear(stored: Tensor, n: int, k: int, scheme: Scheme, where: str) -> Tensor:
    """uint8 [n, ceil(k/32)] of a weight [n, k]. `where` names the tensor. Raises CheckpointError."""
    exponents = _exponents(stored, where) if stored.dtype == torch.float32 else stored
    rows, columns = blocks(n, k, scheme.block)
    if exponents.shape != (rows, columns):
        exponents = _cut(exponents, rows, columns, where)
    if scheme.block == (1, BLOCK):
        return exponents
    needed = -(-k // BLOCK)  # a block may be declared larger than any weight
    repeated = exponents.repeat_interleave(min(scheme.block[1] // BLOCK, needed), 1)[:, :needed]
    return repeated.repeat_interleave(min(scheme.block[0], n), 0)[:n]


def _may_be_padded(scheme: Scheme) -> bool:
    return scheme.declared and scheme.block == (1, BLOCK)


def _covers(shape: tuple[int, ...], needed: tuple[int, int]) -> bool:
    return len(shape) == 2 and shape[0] >= needed[0] and shape[1] >= needed[1]


def _hint(scheme: Scheme, shape: tuple[int, ...], needed: tuple[int, int]) -> str:
    if scheme.declared or not _covers(shape, needed):
        return ""
    return (
        ". Padding is cut off only where a config.json declares the format: it looks like a swizzled layout"
    )


def _exponents(stored: Tensor, where: str) -> Tensor:
    """Bytes of F32 scales, each of which has to be 2^-127 to 2^127 exactly."""
    mantissa, exponent = torch.frexp(stored)
    byte = exponent + (_BIAS - 1)  # frexp's mantissa is in [0.5, 1)
    bad = (mantissa != 0.5) | (byte < 0) | (byte > 254)
    if bad.any():
        first = bad.nonzero()[0].tolist()
        value = float(stored[tuple(first)])
        raise CheckpointError(
            f"{where}: holds {value} at {first}; its scales are declared ue8m0, powers of two from 2^-127 to "
            "2^127. With other scales it is not MXFP8: serve the unquantized model instead",
            expected="powers of two",
            got=value,
        )
    return byte.to(torch.uint8)


def _cut(stored: Tensor, rows: int, columns: int, where: str) -> Tensor:
    """Without its padding, which is one byte throughout: in a swizzled layout scales would lie there."""
    below, beside = stored[rows:], stored[:rows, columns:]
    padding = torch.cat((below.reshape(-1), beside.reshape(-1)))
    if (padding != padding[0]).any():
        raise CheckpointError(
            f"{where}: is {list(stored.shape)}, of which [{rows}, {columns}] are scales; what lies beyond is "
            "not the same byte throughout, so this is no padding but another layout, such as the "
            "kernel's 128x4. Store the scales in linear order, or serve the unquantized model",
            expected=[rows, columns],
            got=list(stored.shape),
        )
    return stored[:rows, :columns].contiguous()
