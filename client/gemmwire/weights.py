"""A layer's new weight -> the bytes of a safetensors file, tensor by tensor in the caller's own memory.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arrays import Framework, framework_of
from .errors import InputError, InvalidArgument
from .messages import Buffer
from .safetensors import DTYPES, header

BLOCK = 32  # codes under one scale
WEIGHT, SCALE, BIAS = "weight", "weight_scale", "bias"

_FLOATS = {name: dtype for dtype, name in DTYPES.items()}
_CODES = {"float8_e4m3fn": "F8_E4M3", "uint8": "F8_E4M3"}
_SCALES = {"float8_e8m0fnu": "U8", "uint8": "U8"}  # as checkpoints store them; not all readers know F8_E8M0
_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor: `dtype` is the format's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    framework: Framework
    array: Any

    @classmethod
    def of(cls, name: str, array: Any, dtypes: Mapping[str, str]) -> Part:
        """Errors: `InputError`."""
        framework = framework_of(array, name)
        dtype = framework.dtype(array)
        if dtype not in dtypes:
            raise InputError(
                "dtype_unsupported",
                f"{name} is {dtype}; {' or '.join(dtypes)} is needed here: convert it first",
            )
        shape = tuple(array.shape if hasattr(array, "shape") else memoryview(array).shape or ())
        if 0 in shape:
            raise InputError("shape_unsupported", f"{name} is {list(shape)}: it has no elements")
        return cls(name, dtypes[dtype], shape, framework, array)

    def refuse_unless(self, shape: tuple[int, ...], why: str) -> None:
        if self.shape != shape:
            raise InputError(
                "shape_unsupported", f"{self.name} is {list(self.shape)}; {list(shape)} is needed: {why}"
            )


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of one layer, checked against each other."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, weight: Any, scale: Any = None, bias: Any = None) -> Weights:
        """weight [N, K], scale [N, ceil(K/32)] if that is E4M3, bias [N]. Errors: `InputError`."""
        part = Part.of(WEIGHT, weight, _CODES if scale is not None else _FLOATS)
        if len(part.shape) != 2:
            raise InputError(
                "rank_unsupported", f"weight is {list(part.shape)}; [N, K] is needed, N outputs and K inputs"
            )
        n, k = part.shape
        parts = [part]
        if scale is not None:
            parts.append(Part.of(SCALE, scale, _SCALES))
            parts[-1].refuse_unless((n, -(-k // BLOCK)), f"one for each row and {BLOCK} columns of weight")
        if bias is not None:
            parts.append(Part.of(BIAS, bias, _FLOATS))
            parts[-1].refuse_unless((n,), "one for each row of weight")
        return cls(tuple(parts))

    @classmethod
    def read(cls, layer: str, entry: Any) -> Weights:
        """A weight, or a mapping of weight, weight_scale and bias.

        Errors: `InputError`, `InvalidArgument`, naming the layer.
        """
        try:
            if not isinstance(entry, Mapping):
                return cls.of(entry)
            others = [name for name in entry if name not in (WEIGHT, SCALE, BIAS)]
            if others or entry.get(WEIGHT) is None:
                raise InvalidArgument(
                    f"there are {[str(name)[:80] for name in entry]}; weight is needed, and {SCALE} and "
                    f"{BIAS} where the layer has them"
                )
            return cls.of(entry[WEIGHT], entry.get(SCALE), entry.get(BIAS))
        except InputError as error:
            raise InputError(error.code, f"Layer {layer!r}: {error}") from error
        except InvalidArgument as error:
            raise InvalidArgument(f"Layer {layer!r}: {error}") from error

    @classmethod
    def read_all(cls, layers: Mapping[str, Any], **others: Any) -> dict[str, Weights]:
        """The weights of several layers; `others` are arguments that only one layer could have.

        Errors: `InputError`, `InvalidArgument`.
        """
        if any(value is not None for value in others.values()):
            raise InvalidArgument(
                f"With a mapping of layers, {', '.join(others)} belong to no layer; refit one at a time, or "
                "give each layer a mapping of its own"
            )
        return {name: cls.read(name, entry) for name, entry in layers.items()}

    def encode(self) -> list[Buffer]:
        """The header and each tensor as buffers of their own, never joined. Errors: `InputError`."""
        # The widest first, so that each lies on a multiple of its elements' size.
        ordered = sorted(self.parts, key=lambda part: -_ITEMSIZE.get(part.dtype, 1))
        tensors = [part.framework.memory(part.array, part.name) for part in ordered]
        entries = [
            (part.name, part.dtype, part.shape, memoryview(tensor).nbytes)
            for part, tensor in zip(ordered, tensors, strict=True)
        ]
        return [header(entries), *tensors]
