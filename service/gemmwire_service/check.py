"""One real forward of a layer before it is served, against two references.

Against the dequantized operands it says that the backend computes what it should: beyond the tolerance the
layer is refused. Against the unquantized weight it says what MXFP8 costs, which is for the user to judge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checkpoint import Probe
from .checkpoint.probe import probe_rows
from .device import Device
from .errors import BackendError
from .layer import Layer, LayerError
from .mxfp8.format import BLOCK, dequantize, quantize
from .mxfp8.weight import MxWeight
from .reference import TOLERANCE

_COLUMNS = 256
_LARGEST, _SMALLEST = 2.0**126, 2.0**-100


def check(layer: Layer, weight: MxWeight, probe: Probe | None, device: Device) -> LayerError:
    """Errors: BackendError where the forward is further than TOLERANCE from the dequantized operands."""
    x = rows_for(layer, probe)
    return judge(layer, weight, probe, device.compute(layer, x))


def rows_for(layer: Layer, probe: Probe | None) -> Tensor:
    """The BF16 [4, K] that a layer is checked with."""
    return probe.x if probe is not None else probe_rows(layer.name, layer.spec.k)


def judge(layer: Layer, weight: MxWeight, probe: Probe | None, y: Tensor) -> LayerError:
    """y: BF16 [4, N], what a backend made of `rows_for(layer, probe)` with `weight`. Errors: BackendError."""
    x, y = rows_for(layer, probe), y.float()
    arithmetic = _against_operands(x, y, weight)
    if not arithmetic <= TOLERANCE:
        raise BackendError(
            f"Backend {layer.backend.name!r} computes layer {layer.name!r} wrongly: its relative error "
            f"against the dequantized operands is {arithmetic:.3g}, at most {TOLERANCE:.3g} "
            "is right; choose another with --backend",
            expected=TOLERANCE,
            got=arithmetic,
        )
    return LayerError(_relative(y, probe.y, y.abs().double()) if probe is not None else None, arithmetic)


def _against_operands(x: Tensor, y: Tensor, weight: MxWeight) -> float:
    """||y - reference|| / ||(reference, bias)||: a bias that cancels the product magnifies no rounding.

    Over evenly spaced output columns, so that a large layer costs no second weight.
    """
    columns = torch.linspace(0, weight.n - 1, min(weight.n, _COLUMNS)).round().long()
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK))
    operand_x = dequantize(*quantize(padded)).double()
    operand_w = dequantize(weight.codes[columns], weight.scales[columns]).double()
    reference = operand_x @ operand_w.T
    largest = operand_x.abs() @ operand_w.abs().T  # of any partial sum, whatever the order
    if weight.bias is None:
        return _relative(y[:, columns], reference, largest)
    bias = weight.bias[columns].double().expand_as(reference)
    return _relative(y[:, columns], reference + bias, largest + bias.abs(), beside=bias)


def _relative(y: Tensor, reference: Tensor, largest: Tensor, beside: Tensor | None = None) -> float:
    """||y - reference|| / ||(reference, beside)||, 0 where all are zero.

    Over what BF16 holds on the way and in the end: a layer may overflow or underflow on the probe's rows,
    which span 2^23, and yet be right.
    """
    exact = reference.double()
    held = (largest < _LARGEST) & ((exact.abs() > _SMALLEST) | (exact == 0))
    error = float((y.double() - exact)[held].norm())
    parts = [exact[held]] + ([] if beside is None else [beside[held]])
    size = float(torch.cat(parts).norm())
    return error / size if size else error
