"""A quantized checkpoint held against the unquantized model that it was made from.

Scales in another order than the one declared have the right names, dtypes and shapes, and answer nonsense:
nothing in the file shows it, and the unquantized weight does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemmwire_service.checkpoint.base import Checkpoint, LayerWeights, listed, shown
from gemmwire_service.checkpoint.linear import FLOATS
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.wrapped import WrappedCheckpoint
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK, dequantize
from gemmwire_service.mxfp8.layout import ScaleLayout, unswizzle
from gemmwire_service.mxfp8.weight import MxWeight

ROWS = 128
SHARE = 100  # one block in so many may be off: methods that clip or compensate change some
_FAR = 0.25
"""Of a block's norm. Elements are within 2^-4 of themselves, or 2^-3 where a scale that was rounded down
saturates; under a scale that is off by one they are off by a half or more."""
_HALF_STEP = -10  # exponent of half of E4M3's smallest step


class SpotChecked(WrappedCheckpoint):
    """A `Checkpoint` whose MXFP8 layers are compared with `reference` when they are read, in ROWS rows.

    Raises CheckpointError where the two have no layer in common, and from `read` for a layer that is not a
    quantization of its namesake.
    """

    def __init__(self, checkpoint: Checkpoint, reference: SafetensorsCheckpoint) -> None:
        super().__init__(checkpoint)
        self._reference = reference
        self._common = {name for name in checkpoint.names() if _comparable(checkpoint, reference, name)}
        if not self._common:
            raise CheckpointError(
                f"{reference.path}: has no unquantized layer of the name and shape of any that is served "
                f"({listed(checkpoint.names())}); give the model that the checkpoint was made from",
                expected=list(checkpoint.names())[:10],
                got=list(reference.names())[:10],
            )

    @property
    def notes(self) -> tuple[str, ...]:
        count = f"{len(self._common)} of {len(self.names())} layers"
        return (*super().notes, f"{count} are held against {self._reference.path}")

    def read(self, name: str) -> LayerWeights:
        weights = super().read(name)
        if name in self._common and weights.source_dtype == "MXFP8":
            rows = torch.linspace(0, weights.weight.n - 1, min(ROWS, weights.weight.n)).round().long()
            tensor = self._reference.linears[name].weight.name
            expected = self._reference.files[tensor].rows(tensor, rows.tolist())
            spot_check(weights.weight, rows, expected, f"layer {shown(name)}", self._reference.path)
        return weights


def spot_check(weight: MxWeight, rows: Tensor, expected: Tensor, where: str, source: object) -> None:
    """Raises CheckpointError unless `weight` at `rows` is a quantization of `expected`, floats [rows, K]."""
    off, blocks = _off(weight, weight.scales, rows, expected), rows.numel() * weight.scales.shape[1]
    if off * SHARE <= blocks:
        return
    swizzled = _unswizzled(weight)
    if swizzled is not None and _off(weight, swizzled, rows, expected) * SHARE <= blocks:
        why = "with its scales taken out of the kernel's 128x4 layout it is: they are swizzled in the file"
    else:
        why = "it is of another model, or its scales are in another order or of another rule"
    raise CheckpointError(
        f"{where} is no quantization of its namesake in {source}: {off} of {blocks} blocks of {BLOCK} "
        f"are off by more than a quarter. Compared with that model {why}. Serve the unquantized model, or "
        "quantize it with gemmwire-serve quantize",
        expected=f"at most {blocks // SHARE} of {blocks} blocks",
        got=off,
    )


def _comparable(checkpoint: Checkpoint, reference: SafetensorsCheckpoint, name: str) -> bool:
    linear = reference.linears.get(name)
    if linear is None or linear.transposed or linear.weight.dtype not in FLOATS:
        return False
    return checkpoint.spec(name)[:2] == (linear.n, linear.k)


def _off(weight: MxWeight, scales: Tensor, rows: Tensor, expected: Tensor) -> int:
    """How many blocks of `rows` are further from `expected` than quantizing takes them."""
    some = scales[rows]
    padded = torch.nn.functional.pad(expected.double(), (0, weight.k_pad - weight.k))
    wrong = (
        (dequantize(weight.codes[rows], some, torch.float64) - padded).unflatten(1, (-1, BLOCK)).norm(dim=2)
    )
    size = padded.unflatten(1, (-1, BLOCK)).norm(dim=2)
    step = torch.ldexp(torch.full(some.shape, BLOCK**0.5, dtype=torch.float64), some.int() - 127 + _HALF_STEP)
    return int((wrong > _FAR * size + step).sum())


def _unswizzled(weight: MxWeight) -> Tensor | None:
    """The scales as they are if the file holds them in the kernel's layout under the shape of linear ones."""
    n, columns = weight.scales.shape
    if n % 128 or columns % 4:
        return None
    return unswizzle(weight.scales.reshape(-1), ScaleLayout.R128C4, n, columns)
