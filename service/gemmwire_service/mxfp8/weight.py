"""A weight in MXFP8 as a checkpoint has it: rows in order, scales linear, only K padded, to a whole block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK, FLOATS, quantize
from gemmwire_service.mxfp8.layout import round_up

_SCALES = (torch.uint8, torch.float8_e8m0fnu)  # two names of one byte
_NAN_CODE = 0x7F  # and 0xFF
_NAN_SCALE = 0xFF
_PIECE = 1 << 18  # codes looked at together


@dataclass(frozen=True, eq=False)
class MxWeight:
    """W [n, k] of y = x @ W.T + bias. Make one with from_float or from_mxfp8, which check what they are
    given.

    codes: float8_e4m3fn [n, k_pad]; scales: uint8 [n, k_pad/32]; bias: float32 [n] or None. k_pad is k
    rounded up to a multiple of 32, and the columns k..k_pad are zero.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    k: int

    @property
    def n(self) -> int:
        return self.codes.shape[0]

    @property
    def k_pad(self) -> int:
        return self.codes.shape[1]

    @classmethod
    def from_float(cls, w: Tensor, bias: Tensor | None = None) -> MxWeight:
        """Quantizes w: BF16, FP16 or FP32 [n, k], any k. FP32 is quantized as it is. bias: the same dtypes,
        [n].

        Raises CheckpointError for another dtype or shape, and for a NaN or Inf, which would quantize to 448.
        """
        _check_float("weight", w)
        n, k = _check_matrix("weight", w)
        _check_finite("weight", w)
        codes, scales = quantize(_pad_columns(w.detach(), round_up(k, BLOCK)))
        return cls(codes, scales, _bias(bias, n), k)

    @classmethod
    def from_mxfp8(cls, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> MxWeight:
        """Takes quantized bytes as they are: codes float8_e4m3fn [n, k], any k, and scales [n, ceil(k/32)].

        Scales are E8M0 exponents, as uint8 or float8_e8m0fnu. Any byte is one, but 0xFF, which is NaN.
        Raises CheckpointError for other dtypes or shapes and for a NaN in either, naming the first.
        """
        if codes.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"codes are {codes.dtype}: float8_e4m3fn is needed; reinterpret bytes by .view(), not .to()",
                expected="float8_e4m3fn",
                got=str(codes.dtype),
            )
        n, k = _check_matrix("codes", codes)
        exponents = _check_scales(scales, (n, round_up(k, BLOCK) // BLOCK))
        bytes_ = codes.detach().view(torch.uint8)
        if _largest_magnitude(bytes_) == _NAN_CODE:
            _refuse("codes", bytes_, (bytes_ & 0x7F) == _NAN_CODE, "is the NaN of E4M3")
        _refuse("scales", exponents, exponents == _NAN_SCALE, "is the NaN of E8M0")
        padded = _pad_columns(bytes_, round_up(k, BLOCK)).view(torch.float8_e4m3fn)
        return cls(padded, exponents, _bias(bias, n), k)


def all_finite(tensor: Tensor) -> bool:
    """Of at least one element. Its ends tell, 20 times as fast as a mask of it: a NaN is both of them."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _largest_magnitude(codes: Tensor) -> int:
    """Of E4M3 codes as bytes, signs aside. A piece at a time: a mask of all would be a second weight."""
    return max(int((piece & 0x7F).max()) for piece in codes.reshape(-1).split(_PIECE))


def _bias(bias: Tensor | None, n: int) -> Tensor | None:
    if bias is None:
        return None
    _check_float("bias", bias)
    if bias.shape != (n,):
        raise CheckpointError(
            f"bias is {list(bias.shape)}: a weight of {n} rows needs [{n}]",
            expected=[n],
            got=list(bias.shape),
        )
    _check_finite("bias", bias)
    return bias.detach().to(torch.float32)


def _check_float(what: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{what} is {tensor.dtype}: bfloat16, float16 or float32 is needed; convert it to one of them",
            expected=[str(dtype) for dtype in FLOATS],
            got=str(tensor.dtype),
        )


def _check_matrix(what: str, matrix: Tensor) -> tuple[int, int]:
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise CheckpointError(
            f"{what}: shape {list(matrix.shape)}; a linear layer's weight is [n, k] with n and k at least 1",
            expected="[n, k]",
            got=list(matrix.shape),
        )
    return matrix.shape[0], matrix.shape[1]


def _check_scales(scales: Tensor, needed: tuple[int, int]) -> Tensor:
    """The scales as uint8, the same bytes."""
    if scales.dtype not in _SCALES:
        raise CheckpointError(
            f"scales are {scales.dtype}: MXFP8 scales are E8M0 exponents, as uint8 or float8_e8m0fnu. A "
            "float scale belongs to another format: serve the unquantized weight instead",
            expected=[str(dtype) for dtype in _SCALES],
            got=str(scales.dtype),
        )
    if scales.shape != needed:
        raise CheckpointError(
            f"scales are {list(scales.shape)}: {list(needed)} is needed, one byte per row and {BLOCK} codes, "
            "in linear order (not swizzled, not padded)",
            expected=list(needed),
            got=list(scales.shape),
        )
    return scales.detach().view(torch.uint8)


def _check_finite(what: str, tensor: Tensor) -> None:
    if not all_finite(tensor.detach()):
        _refuse(what, tensor, ~tensor.isfinite(), "is not finite")


def _refuse(what: str, tensor: Tensor, bad: Tensor, why: str) -> None:
    """Raises CheckpointError if any is bad, with the position of the first."""
    if not bad.any():
        return
    first = bad.nonzero()[0].tolist()
    value = tensor[tuple(first)].item()
    shown = f"{value:#04x}" if isinstance(value, int) else f"{value}"
    raise CheckpointError(
        f"{what}{first} is {shown}, which {why}, as are {int(bad.sum())} of {bad.numel()} in all; the source "
        "is damaged or of another format",
        expected=f"{what} without it",
        got=shown,
    )


def _pad_columns(matrix: Tensor, columns: int) -> Tensor:
    missing = columns - matrix.shape[1]
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix
