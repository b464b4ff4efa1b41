"""Linear layers of a model in safetensors: one file, a folder of files, or a shard index.

Weights in BF16, F16 and F32 are quantized when they are read; MXFP8 weights (E4M3 with E8M0 scales) are taken
as they are, byte for byte.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from gemmwire_service.checkpoint.base import LayerShape, LayerWeights, no_layer, shown, unknown_layer
from gemmwire_service.checkpoint.float_layer import check_finite, quantize_layer
from gemmwire_service.checkpoint.hf_config import Declared, read_declared
from gemmwire_service.checkpoint.linear import Linear, find_linears
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.checkpoint.shards import open_shards
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.weight import MxWeight


class SafetensorsCheckpoint:
    """A `Checkpoint` over safetensors files. Opening it reads headers alone."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self._path = path
        shards = open_shards(path)
        declared = read_declared(shards.folder)
        self._files = shards.files
        tensors = {name: file.tensors[name] for name, file in shards.files.items()}
        self._linears, skipped = find_linears(tensors, declared, path)
        self.skipped = skipped + shards.skipped
        if not self._linears:
            raise no_layer(self.skipped, path)
        self.notes = shards.notes + _transposed_note(self._linears, declared)

    def names(self) -> tuple[str, ...]:
        return tuple(self._linears)

    def spec(self, name: str) -> LayerShape:
        linear = self._linear(name)
        return LayerShape(linear.n, linear.k, linear.bias is not None)

    def read(self, name: str) -> LayerWeights:
        linear = self._linear(name)
        bias = None if linear.bias is None else self._load_finite(linear.bias).float()
        if linear.scale is not None:
            return self._take(linear, linear.scale, bias)
        weight = self._load_finite(linear.weight)
        if linear.transposed:
            weight = weight.T.contiguous()
        return quantize_layer(name, weight, bias)

    def _linear(self, name: str) -> Linear:
        if name not in self._linears:
            raise unknown_layer(name, self._linears, self._path)
        return self._linears[name]

    def _load(self, info: TensorInfo) -> Tensor:
        return self._files[info.name].load(info.name)

    def _load_finite(self, info: TensorInfo) -> Tensor:
        return check_finite(self._load(info), self._files[info.name].where(info.name))

    def _take(self, linear: Linear, scale: TensorInfo, bias: Tensor | None) -> LayerWeights:
        """An MXFP8 layer as stored. There is no unquantized weight to compare with, hence no probe."""
        codes, scales = self._load(linear.weight), self._load(scale)
        try:
            weight = MxWeight.from_mxfp8(codes, scales, bias)
        except CheckpointError as error:
            path = self._files[linear.weight.name].path
            message = f"{path}: tensors {shown(linear.weight.name)}, {shown(scale.name)}: {error}"
            raise CheckpointError(message, expected=error.expected, got=error.got) from error
        return LayerWeights(linear.name, weight, "MXFP8", None)


def _transposed_note(linears: dict[str, Linear], declared: Declared) -> tuple[str, ...]:
    count = sum(linear.transposed for linear in linears.values())
    if not count:
        return ()
    modules = ", ".join(sorted(declared.transposed))
    what = f"{count} weights ({modules}) are stored [in, out] and transposed"
    return (f"model_type {declared.model_type}: {what}",)
