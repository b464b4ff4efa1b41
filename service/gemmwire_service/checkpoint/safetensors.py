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
    """A `Checkpoint` over safetensors files. Opening it reads headers alone.

    files: the file of every tensor of the model, by the tensor's name. linears: the tensors of every layer.
    """

    format = "safetensors"

    def __init__(self, path: Path, allow_unquantized: bool = False) -> None:
        self.path = path
        shards = open_shards(path)
        declared = read_declared(shards.folder)
        self.files, self._scheme = shards.files, declared.scheme
        tensors = {name: file.tensors[name] for name, file in shards.files.items()}
        self.linears, skipped = find_linears(tensors, declared, path, allow_unquantized)
        self._refuse_comfyui()
        self.skipped = skipped + shards.skipped
        if not self.linears:
            raise no_layer(self.skipped, path)
        self.notes = shards.notes + _transposed_note(self.linears, declared) + self._scheme_notes()

    def names(self) -> tuple[str, ...]:
        return tuple(self.linears)

    def spec(self, name: str) -> LayerShape:
        linear = self._linear(name)
        return LayerShape(linear.n, linear.k, linear.bias is not None)

    def nbytes(self, name: str) -> int:
        return sum(part.nbytes for part in self._linear(name).parts())

    def read(self, name: str) -> LayerWeights:
        linear = self._linear(name)
        bias = None if linear.bias is None else self._load_finite(linear.bias).float()
        if linear.scale is not None:
            # There is no unquantized weight to compare with, hence no probe.
            return LayerWeights(linear.name, self._take(linear, linear.scale, bias), "MXFP8", None)
        return quantize_layer(name, self._load_float(linear), bias)

    def has_unquantized(self, name: str) -> bool:
        return self._linear(name).scale is None

    def unquantized(self, name: str) -> Tensor:
        linear = self._linear(name)
        if linear.scale is not None:
            where = self.files[linear.weight.name].where(linear.weight.name)
            raise CheckpointError(
                f"{where}: is in MXFP8, and what it was made from is not here; give the unquantized model",
                expected="BF16, F16 or F32",
                got=linear.weight.dtype,
            )
        return self._load_float(linear)

    def quantized(self, name: str) -> MxWeight:
        """The weight of `read`, without the bias and the probe."""
        linear = self._linear(name)
        if linear.scale is not None:
            return self._take(linear, linear.scale, None)
        return MxWeight.from_float(self._load_float(linear))

    def _linear(self, name: str) -> Linear:
        if name not in self.linears:
            raise unknown_layer(name, self.linears, self.path)
        return self.linears[name]

    def _load(self, info: TensorInfo) -> Tensor:
        return self.files[info.name].load(info.name)

    def _load_float(self, linear: Linear) -> Tensor:
        """The weight [N, K], finite, in its own dtype."""
        weight = self._load_finite(linear.weight)
        return weight.T.contiguous() if linear.transposed else weight

    def _load_finite(self, info: TensorInfo) -> Tensor:
        return check_finite(self._load(info), self.files[info.name].where(info.name))

    def _refuse_comfyui(self) -> None:
        for linear in self.linears.values():
            file = self.files[linear.weight.name]
            said = comfyui.declaration(linear.name, self.files, file.metadata) if linear.scale else None
            if said is not None:
                raise CheckpointError(
                    f"{file.where(linear.weight.name)}: {shown(said)} says that this is a file of ComfyUI, "
                    "whose scales are in the kernel's 128x4 layout, though their shape is that of linear "
                    "order; give the unquantized model, or one that ModelOpt or compressed-tensors made",
                    expected="scales in linear order",
                    got="swizzled scales",
                )

    def _scheme_notes(self) -> tuple[str, ...]:
        quantized = [linear for linear in self.linears.values() if linear.scale]
        if not quantized:
            return ()
        notes = [f"{len(quantized)} weights are taken as they are: {self._scheme.name}"]
        if not self._scheme.declared:
            notes = [
                f"{len(quantized)} weights are taken as MXFP8 with scales in linear order, by their names "
                "and dtypes: no config.json declares a quantization"
            ]
        floats = [linear.name for linear in self.linears.values() if not linear.scale]
        if floats:
            notes.append(f"{len(floats)} weights that it leaves unquantized are quantized: {listed(floats)}")
        return (*notes, *self._scheme.notes)

    def _take(self, linear: Linear, scale: TensorInfo, bias: Tensor | None) -> MxWeight:
        """An MXFP8 layer as stored."""
        codes, stored = self._load(linear.weight), self._load(scale)
        scales = to_linear(stored, linear.n, linear.k, self._scheme, self.files[scale.name].where(scale.name))
        try:
            return MxWeight.from_mxfp8(codes, scales, bias)
        except CheckpointError as error:
            path = self.files[linear.weight.name].path
            message = f"{path}: tensors {shown(linear.weight.name)}, {shown(scale.name)}: {error}"
            raise CheckpointError(message, expected=error.expected, got=error.got) from error


def _transposed_note(linears: dict[str, Linear], declared: Declared) -> tuple[str, ...]:
    count = sum(linear.transposed for linear in linears.values())
    if not count:
        return ()
    modules = ", ".join(sorted(declared.transposed))
    what = f"{count} weights ({modules}) are stored [in, out] and transposed"
    return (f"model_type {declared.model_type}: {what}",)
