"""Linear layers of a model in safetensors: one file, a folder of files, or a shard index.

Weights in BF16, F16 and F32 are quantized when they are read; MXFP8 weights (E4M3 with E8M0 scales) are taken
as they are, byte for byte, in whatever scheme the folder declares (`schemes`).
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from gemmwire_service.checkpoint.base import (
    LayerShape,
    LayerWeights,
    listed,
    no_layer,
    shown,
    unknown_layer,
)
from gemmwire_service.checkpoint.float_layer import check_finite, quantize_layer
from gemmwire_service.checkpoint.hf_config import Declared, read_declared
from gemmwire_service.checkpoint.linear import Linear, find_linears
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.checkpoint.scales import to_linear
from gemmwire_service.checkpoint.schemes import comfyui
from gemmwire_service.checkpoint.shards import open_shards
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.weight import MxWeight


class SafetensorsCheckpoint:
    """A `Checkpoint` over safetensors files. Opening it reads headers alone."""

    format = "safetensors"

    def __init__(self, path: Path, allow_unquantized: bool = False) -> None:
        self._path = path
        shards = open_shards(path)
        declared = read_declared(shards.folder)
        self._files, self._scheme = shards.files, declared.scheme
        tensors = {name: file.tensors[name] for name, file in shards.files.items()}
        self._linears, skipped = find_linears(tensors, declared, path, allow_unquantized)
        self._refuse_comfyui()
        self.skipped = skipped + shards.skipped
        if not self._linears:
            raise no_layer(self.skipped, path)
        self.notes = shards.notes + _transposed_note(self._linears, declared) + self._scheme_notes()

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

    def _refuse_comfyui(self) -> None:
        for linear in self._linears.values():
            file = self._files[linear.weight.name]
            said = comfyui.declaration(linear.name, self._files, file.metadata) if linear.scale else None
            if said is not None:
                raise CheckpointError(
                    f"{file.where(linear.weight.name)}: {shown(said)} says that this is a file of ComfyUI, "
                    "whose scales are in the kernel's 128x4 layout, though their shape is that of linear "
                    "order; give the unquantized model, or one that ModelOpt or compressed-tensors made",
                    expected="scales in linear order",
                    got="swizzled scales",
                )

    def _scheme_notes(self) -> tuple[str, ...]:
        quantized = [linear for linear in self._linears.values() if linear.scale]
        if not quantized:
            return ()
        notes = [f"{len(quantized)} weights are taken as they are: {self._scheme.name}"]
        if not self._scheme.declared:
            notes = [
                f"{len(quantized)} weights are taken as MXFP8 with scales in linear order, by their names "
                "and dtypes: no config.json declares a quantization"
            ]
        floats = [linear.name for linear in self._linears.values() if not linear.scale]
        if floats:
            notes.append(f"{len(floats)} weights that it leaves unquantized are quantized: {listed(floats)}")
        return (*notes, *self._scheme.notes)

    def _take(self, linear: Linear, scale: TensorInfo, bias: Tensor | None) -> LayerWeights:
        """An MXFP8 layer as stored. There is no unquantized weight to compare with, hence no probe."""
        codes, stored = self._load(linear.weight), self._load(scale)
        scales = to_linear(
            stored, linear.n, linear.k, self._scheme, self._files[scale.name].where(scale.name)
        )
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
