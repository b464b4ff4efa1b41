"""A layer out of a float weight: checked, quantized, probed, measured."""

from __future__ import annotations

import torch
from torch import Tensor

from gemmwire_service.checkpoint.base import LayerWeights
from gemmwire_service.checkpoint.probe import make_probe
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.fidelity import Fidelity
from gemmwire_service.mxfp8.weight import MxWeight, all_finite

SOURCE_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_CHUNK = 1 << 18  # elements looked at together: the mask of a whole weight would be memory for nothing


def quantize_layer(name: str, weight: Tensor, bias: Tensor | None) -> LayerWeights:
    """`weight` BF16, F16 or F32 [N, K] with finite values, quantized from its own dtype; `bias` FP32 [N]."""
    mx = MxWeight.from_float(weight, bias)
    probe, fidelity = make_probe(name, weight, bias), Fidelity.sample(weight, mx)
    return LayerWeights(name, mx, SOURCE_DTYPES[weight.dtype], probe, fidelity)


def check_finite(tensor: Tensor, where: str) -> Tensor:
    """`tensor` (contiguous) itself. Raises CheckpointError at its first NaN or Inf; `where` names it."""
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if not all_finite(chunk):
            bad = ~torch.isfinite(chunk)
            position = start + int(bad.to(torch.uint8).argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(position), tensor.shape)]
            value = float(flat[position])
            raise CheckpointError(
                f"{where}: holds {value} at {index}; a weight has to be finite, because one such value "
                "takes its whole output feature with it. The file is damaged or its training diverged",
                expected="finite values",
                got=f"{value} at {index}",
            )
    return tensor
