"""The same arithmetic on any device: exact dequantization to BF16, then one matmul with FP32 accumulation.

An E4M3 element times a power of two has 4 significant bits, so BF16 (8 bits) holds it exactly and the
products of a dot product are those of the MXFP8 kernel. The bias takes part in the same accumulation, so that
the result is rounded once: its FP32 is split into three BF16 parts, which are three more columns of the
weight, against ones in x.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, check_shapes, foreign_weight
from gemmwire_service.backends.block_scaled import without_elements
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.fake import Workspace, fake_quantize, few_rows_here
from gemmwire_service.mxfp8.few_rows import LARGEST, FewRows
from gemmwire_service.mxfp8.format import dequantize
from gemmwire_service.mxfp8.weight import MxWeight, all_finite

log = logging.getLogger("gemmwire.emulation")

DEVICES = ("cpu", "cuda")
BIAS_PARTS = 3
_PACK_ROWS = 16  # the M that the order is chosen for
_PACK_FROM = 1 << 16  # elements; below it the call costs more than the order saves
BIAS_COLUMNS = 32  # the parts, and zeros up to a width that matmul kernels like
_CACHED = 1 << 21  # elements of x
_AT_ONCE = 1 << 22  # elements of a weight that are dequantized together
_TRUNCATE = -1 << 16  # keeps the upper half of an FP32, which is a BF16
_COPY_HOLDING_UP_TO = 1 << 20  # bytes
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = None


@dataclass(frozen=True, eq=False)
class EmulationWeight(PreparedWeight):
    """matrix: BF16 [n, columns], columns being k_pad, and 32 more with the bias parts if there is a bias.

    `packed`: it is in the order that oneDNN multiplies from, which halves the time of a small x. `plain`: the
    same once more in its own order, where it is small enough for the matmul of few rows.
    """

    matrix: Tensor
    columns: int
    packed: bool
    plain: Tensor | None


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Where x is rounded to: as wide as the matrix, the columns of the bias already one."""

    operand: Tensor  # BF16 [bucket, columns of the matrix]
    x: Tensor  # its first k_pad columns
    workspace: Workspace

    def head(self, bucket: int) -> _Scratch:
        return _Scratch(self.operand[:bucket], self.x[:bucket], self.workspace)


_Key = tuple[int, int, int, torch.device]  # bucket, k_pad, columns
_Width = tuple[int, int, torch.device]  # k_pad, columns


class Operands:
    """x, rounded to MXFP8, beside the ones that the bias takes: one scratch per thread and width, of which a
    bucket has the first rows. One that grows leaves the smaller to the graphs that hold its address."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def rounded(self, x: Tensor, k_pad: int, columns: int) -> Tensor:
        """BF16 [bucket, k_pad] -> BF16 [bucket, columns], good until the next call. A non-finite element of x
        is NaN in it, and with it every dot product over its row."""
        kept: dict[_Key, _Scratch] = self._threads.__dict__.setdefault("kept", {})
        key = (x.shape[0], k_pad, columns, x.device)
        scratch = kept.get(key)
        if scratch is None:
            scratch = kept[key] = self._large(*key).head(x.shape[0])
        fake_quantize(x, scratch.x, scratch.workspace)
        return scratch.operand

    def _large(self, bucket: int, k_pad: int, columns: int, device: torch.device) -> _Scratch:
        large: dict[_Width, _Scratch] = self._threads.__dict__.setdefault("large", {})
        found = large.get((k_pad, columns, device))
        if found is None or len(found.operand) < bucket:
            if device.type == "cpu":  # where no graph holds them, the smaller would be kept for nothing
                kept: dict[_Key, _Scratch] = self._threads.kept
                for key in [each for each in kept if each[1:] == (k_pad, columns, device)]:
                    del kept[key]
            found = large[k_pad, columns, device] = _allocate(bucket, k_pad, columns, device)
        return found


class Emulation:
    name: ClassVar[str] = "emulation"

    def __init__(self) -> None:
        self._operands = Operands()

    def unavailable(self, device: torch.device) -> str | None:
        return unavailable(device)

    def rejects(self, spec: LayerSpec) -> str | None:
        return without_elements(spec)

    def prepare(self, weight: MxWeight, device: torch.device) -> EmulationWeight:
        """Raises BackendError if a dequantized value is above BF16's largest, 3.39e38."""
        keep_sums_in_fp32(device)
        n, k_pad = weight.n, weight.k_pad
        columns = k_pad if weight.bias is None else k_pad + BIAS_COLUMNS
        matrix = torch.empty(n, columns, dtype=torch.bfloat16, device=device)
        for rows, part in dequantized(weight, device):
            matrix[rows, :k_pad] = part
        if weight.bias is not None:
            matrix[:, k_pad:] = bias_columns(weight.bias.to(device))
        packed = _pack(matrix)
        return EmulationWeight(
            "bf16" if packed is None else "bf16, packed by oneDNN",
            n,
            weight.k,
            n,
            k_pad,
            matrix if packed is None else packed,
            columns,
            packed is not None,
            matrix if packed is not None and few_rows_for(matrix) is not None else None,
        )

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return (Plan(bucket),)

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if not isinstance(weight, EmulationWeight):
            raise foreign_weight(self.name, weight)
        check_shapes(x, weight, plan, out)
        rows = rows_at_once(x)
        if rows == plan.bucket:
            return _place(self._multiply(x, weight, out), out)
        for start in range(0, plan.bucket, rows):
            part = out[start : start + rows]
            _place(self._multiply(x[start : start + rows], weight, part), part)
        return None

    def product(self, x: Tensor, weight: PreparedWeight, plan: Plan) -> Tensor:
        """oneDNN gives y in memory of its own, from a weight in its own order."""
        if isinstance(weight, EmulationWeight) and weight.packed and rows_at_once(x) == plan.bucket:
            return self._multiply(x, weight, None)
        out = torch.empty(plan.bucket, weight.n_pad, dtype=torch.bfloat16, device=x.device)
        self.forward(x, weight, plan, out)
        return out

    def _multiply(self, x: Tensor, weight: EmulationWeight, out: Tensor | None) -> Tensor:
        """-> y, in `out` where there is one and the matmul can write there."""
        operand = self._operands.rounded(x, weight.k_pad, weight.columns)
        y = multiply_few(operand, weight.plain if weight.packed else weight.matrix, out)
        if y is not None:
            return y
        if weight.packed:
            return _linear(operand, weight.matrix)
        return torch.mm(operand, weight.matrix.t(), out=out)


def rows_at_once(x: Tensor) -> int:
    """How many rows are rounded and then multiplied: on one thread as many as stay in its caches meanwhile,
    where all of [2048, 4096] would take a fifth longer. Several wait for each other too often for that.

    Equal parts, so that the bits of a row are the same wherever it stands.
    """
    rows = x.shape[0]
    if x.is_cpu and torch.get_num_threads() == 1:
        while rows * x.shape[1] > _CACHED and not rows % 2:
            rows //= 2
    return rows


def few_rows_for(matrix: Tensor) -> FewRows | None:
    """The matmul for few rows of x, where there is one for a weight of this size and place."""
    on_cpu = matrix.device.type == "cpu" and not matrix.is_mkldnn
    return few_rows_here() if on_cpu and matrix.nbytes <= LARGEST else None


def multiply_few(operand: Tensor, matrix: Tensor | None, out: Tensor | None) -> Tensor | None:
    """operand @ matrix.T, in `out` where there is one; None where operand has not few rows."""
    few = few_rows_for(matrix) if matrix is not None else None
    if few is None or matrix is None or operand.shape[0] > few.most:
        return None
    if out is None:
        out = torch.empty(operand.shape[0], matrix.shape[0], dtype=torch.bfloat16)
    elif not out.is_contiguous():
        return None
    few.multiply(operand, matrix, out)
    return out


def unavailable(device: torch.device) -> str | None:
    """Why emulation, in any form of the weight, does not run on a device."""
    if device.type not in DEVICES:
        return f"runs on {' and '.join(DEVICES)}, not on {device.type}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device here"
    return None


def keep_sums_in_fp32(device: torch.device) -> None:
    """cuBLAS may otherwise add the parts of a split K in BF16, as for N=130, K=4096 on an H200."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def dequantized(weight: MxWeight, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Some rows at a time and their BF16 [rows, k_pad] on `device`, until all are covered.

    Raises BackendError if a value is above BF16's largest.
    """
    step = max(1, _AT_ONCE // weight.k_pad)
    for start in range(0, weight.n, step):
        rows = slice(start, min(start + step, weight.n))
        part = dequantize(weight.codes[rows].to(device), weight.scales[rows].to(device), torch.bfloat16)
        _refuse_overflow(part, start)
        yield rows, part


def bias_columns(bias: Tensor) -> Tensor:
    """FP32 [n] -> BF16 [n, 32], the columns of the weight against which x has ones."""
    columns = torch.zeros(len(bias), BIAS_COLUMNS, dtype=torch.bfloat16, device=bias.device)
    for column, part in enumerate(split_bias(bias)):
        columns[:, column] = part
    return columns


def _allocate(bucket: int, k_pad: int, columns: int, device: torch.device) -> _Scratch:
    # Tensors made in inference mode could not be written outside it, where a later forward may be.
    with torch.inference_mode(False):
        operand = torch.ones(bucket, columns, dtype=torch.bfloat16, device=device)
        return _Scratch(operand, operand[:, :k_pad], Workspace(bucket, k_pad, device))


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def _place(y: Tensor, out: Tensor) -> None:
    """Have y in `out`: without giving Python's lock away, where the copy is short, since the event loop may
    keep it for longer."""
    if y is out:
        return
    if y.nbytes <= _COPY_HOLDING_UP_TO and out.is_contiguous():
        _memmove(out.data_ptr(), y.data_ptr(), y.nbytes)
    else:
        out.copy_(y)


def _pack(matrix: Tensor) -> Tensor | None:
    """The matrix as oneDNN multiplies from it, or None where this torch cannot, or not to the same bits.

    Compiled models call the same two operators; they are private to torch, hence the trial.
    """
    if matrix.device.type != "cpu" or matrix.numel() < _PACK_FROM or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACK_ROWS)
        x = matrix[:_PACK_ROWS]
        same = torch.equal(_bits(_linear(x, packed)), _bits(torch.mm(x, matrix.t())))
    except (AttributeError, RuntimeError) as error:
        log.info("weights are not packed for oneDNN: %s", error)
        return None
    return packed if same else None


def _bits(y: Tensor) -> Tensor:
    """Of BF16: a NaN is equal to itself, so that no content of a weight decides on its form."""
    return y.view(torch.int16)


def split_bias(bias: Tensor) -> Iterator[Tensor]:
    """Three BF16 parts, as FP32 [n], that add up to the FP32 bias: 8 of its 24 bits each, by truncation."""
    for _ in range(BIAS_PARTS):
        part = (bias.view(torch.int32) & _TRUNCATE).view(torch.float32)
        yield part
        bias = bias - part


def _refuse_overflow(part: Tensor, first: int) -> None:
    if all_finite(part):
        return
    row, column = (~part.isfinite()).nonzero()[0].tolist()
    raise BackendError(
        f"weight[{first + row}, {column}] is too large for emulation, which holds weights in BF16, up to "
        "3.39e38 = 255 * 2^120; scale the layer down, or serve it with a backend that keeps it in MXFP8",
        expected="at most 255 * 2^120",
        got=f"weight[{first + row}, {column}]",
    )
