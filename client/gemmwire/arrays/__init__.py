"""Arrays of the caller <-> wire tensors.

x may be float32, float16 or bfloat16, of any rank from 1, with any strides: rows are made contiguous, and an
array that is contiguous already is sent from its own memory. y comes back in x's framework, and for torch on
x's device, over the memory that received it. NumPy and torch are never imported for an object of the other:
an array of either can only come from a caller that has imported it.
"""

from __future__ import annotations

from gemmwire.errors import InputError, InvalidArgument

from .framework import DATATYPES, NAMES, Framework
from .of_buffer import Buffers
from .of_dlpack import DLPack
from .of_numpy import NumPy
from .of_torch import Torch

__all__ = ["FRAMEWORKS", "NAMES", "Framework", "datatype_of", "framework_of"]

# torch tensors and NumPy arrays offer DLPack and the buffer protocol too, so those come first.
FRAMEWORKS: tuple[Framework, ...] = (Torch(), NumPy(), DLPack(), Buffers())


def framework_of(x: object, name: str = "x") -> Framework:
    """Errors: `InputError` (`type_unsupported`) for a list, a scalar, a data frame, ..."""
    for framework in FRAMEWORKS:
        if framework.owns(x):
            return framework
    raise InputError(
        "type_unsupported",
        f"{name} is of type {type(x).__name__}; a NumPy array, a torch tensor, or one that has "
        f"DLPack or is a buffer, of floats is needed: pass numpy.asarray({name}, dtype=numpy.float32)",
    )


def datatype_of(dtype: object) -> str:
    """A wire name ("FP32"), a NumPy or torch dtype, or its name -> wire name. Errors: `InvalidArgument`."""
    named = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    name = str(named).removeprefix("torch.")
    datatype = name if name in NAMES else DATATYPES.get(name)
    if datatype is None:
        raise InvalidArgument(
            f"output_dtype is {name[:40]!r}; y can be FP32, FP16 or BF16 (float32, float16 or bfloat16)"
        )
    return datatype
