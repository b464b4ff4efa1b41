"""The same arithmetic on any device: exact dequantization to BF16, then one matmul with FP32 accumulation.

An E4M3 element times a power of two has 4 significant bits, so BF16 (8 bits) holds it exactly and the
products of a dot product are those of the MXFP8 kernel. The bias takes part in the same accumulation, so that
the result is rounded once: its FP32 is split into three BF16 parts, which are three more columns of the
weight, against ones in x.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight, check_shapes, foreign_weight
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.fake import Workspace, fake_quantize
from gemmwire_service.mxfp8.format import dequantize
from gemmwire_service.mxfp8.weight import MxWeight

log = logging.getLogger("gemmwire.emulation")

DEVICES = ("cpu", "cuda")
BIAS_PARTS = 3
_PACK_ROWS = 16  # the M that the order is chosen for
_PACK_FROM = 1 << 16  # elements; below it the call costs more than the order saves
_BIAS_COLUMNS = 32  # the parts, and zeros up to a width that matmul kernels like
_TRUNCATE = -1 << 16  # keeps the upper half of an FP32, which is a BF16


@dataclass(frozen=True, eq=False)
class EmulationWeight(PreparedWeight):
    """matrix: BF16 [n, columns], columns being k_pad, and 32 more with the bias parts if `bias`.

    `packed`: it is in the order that oneDNN multiplies from, which halves the time of a small x.
    """

    matrix: Tensor
    columns: int
    bias: bool
    packed: bool


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Where x is rounded to: as wide as the matrix, the columns of the bias already one."""

    operand: Tensor  # BF16 [bucket, columns of the matrix]
    x: Tensor  # its first k_pad columns
    workspace: Workspace


_Key = tuple[int, int, bool, torch.device]  # bucket, k_pad, whether there is a bias


class Emulation:
    """Keeps one scratch per thread, bucket and width."""

    name: ClassVar[str] = "emulation"

    def __init__(self) -> None:
        self._threads = threading.local()

    def unavailable(self, device: torch.device) -> str | None:
        if device.type not in DEVICES:
            return f"runs on {' and '.join(DEVICES)}, not on {device.type}"
        if device.type == "cuda" and not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device here"
        return None

    def rejects(self, spec: LayerSpec) -> str | None:
        return None if spec.n > 0 and spec.k > 0 else f"N={spec.n}, K={spec.k}: both have to be at least 1"

    def prepare(self, weight: MxWeight, device: torch.device) -> EmulationWeight:
        """Raises BackendError if a dequantized value is above BF16's largest, 3.39e38."""
        if device.type == "cuda":
            # cuBLAS may otherwise add the parts of a split K in BF16, as for N=130, K=4096 on an H200.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        n, k_pad, bias = weight.n, weight.k_pad, weight.bias
        columns = k_pad if bias is None else k_pad + _BIAS_COLUMNS
        matrix = torch.zeros(n, columns, dtype=torch.bfloat16, device=device)
        matrix[:, :k_pad] = dequantize(weight.codes.to(device), weight.scales.to(device), torch.bfloat16)
        _refuse_overflow(matrix)
        if bias is not None:
            for column, part in enumerate(split_bias(bias.to(device)), k_pad):
                matrix[:, column] = part
        packed = _pack(matrix)
        return EmulationWeight(
            "bf16" if packed is None else "bf16, packed by oneDNN",
            n,
            weight.k,
            n,
            k_pad,
            matrix if packed is None else packed,
            columns,
            bias is not None,
            packed is not None,
        )

    def plans(self, bucket: int) -> tuple[Plan, ...]:
        return (Plan(bucket),)

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        """A non-finite element of x is NaN in the rounded x, and with it every dot product over its row."""
        if not isinstance(weight, EmulationWeight):
            raise foreign_weight(self.name, weight)
        check_shapes(x, weight, plan, out)
        scratch = self._scratch(plan.bucket, weight, x.device)
        fake_quantize(x, scratch.x, scratch.workspace)
        if weight.packed:
            out.copy_(_linear(scratch.operand, weight.matrix))
        else:
            torch.mm(scratch.operand, weight.matrix.t(), out=out)

    def _scratch(self, bucket: int, weight: EmulationWeight, device: torch.device) -> _Scratch:
        kept: dict[_Key, _Scratch] = self._threads.__dict__.setdefault("kept", {})
        key = (bucket, weight.k_pad, weight.bias, device)
        if key not in kept:
            kept[key] = _allocate(bucket, weight, device)
        return kept[key]


def _allocate(bucket: int, weight: EmulationWeight, device: torch.device) -> _Scratch:
    # Tensors made in inference mode could not be written outside it, where a later forward may be.
    with torch.inference_mode(False):
        operand = torch.ones(bucket, weight.columns, dtype=torch.bfloat16, device=device)
        return _Scratch(operand, operand[:, : weight.k_pad], Workspace(bucket, weight.k_pad, device))


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return y


def _pack(matrix: Tensor) -> Tensor | None:
    """The matrix as oneDNN multiplies from it, or None where this torch cannot, or not to the same bits.

    Compiled models call the same two operators; they are private to torch, hence the trial.
    """
    if matrix.device.type != "cpu" or matrix.numel() < _PACK_FROM or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACK_ROWS)
        x = matrix[:_PACK_ROWS]
        same = torch.equal(_linear(x, packed), torch.mm(x, matrix.t()))
    except (AttributeError, RuntimeError) as error:
        log.info("weights are not packed for oneDNN: %s", error)
        return None
    return packed if same else None


def split_bias(bias: Tensor) -> Iterator[Tensor]:
    """Three BF16 parts, as FP32 [n], that add up to the FP32 bias: 8 of its 24 bits each, by truncation."""
    for _ in range(BIAS_PARTS):
        part = (bias.view(torch.int32) & _TRUNCATE).view(torch.float32)
        yield part
        bias = bias - part


def _refuse_overflow(matrix: Tensor) -> None:
    ends = torch.stack(torch.aminmax(matrix))
    if ends.isfinite().all():
        return
    row, column = (~matrix.isfinite()).nonzero()[0].tolist()
    raise BackendError(
        f"weight[{row}, {column}] is too large for emulation, which holds weights in BF16, up to 3.39e38 = "
        "255 * 2^120; scale the layer down, or serve it with a backend that keeps it in MXFP8",
        expected="at most 255 * 2^120",
        got=f"weight[{row}, {column}]",
    )
