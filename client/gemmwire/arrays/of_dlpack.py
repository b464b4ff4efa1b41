"""Arrays of other libraries (JAX, CuPy, ...), by DLPack: https://dmlc.github.io/dlpack/latest/

They are seen through NumPy where it can (in host memory, float32 and float16), else through torch if the
caller has imported it. y goes back by the `from_dlpack` of x's own library, as the array API standard has it.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from gemmwire.errors import InputError
from gemmwire.messages import Buffer, Tensor

from .framework import Framework
from .of_numpy import NumPy
from .of_torch import Torch

_HOST = 1  # DLPack's kDLCPU


class DLPack:
    name: ClassVar[str] = "dlpack"

    def owns(self, x: object) -> bool:
        return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")

    def to_wire(self, x: Any, name: str) -> Tensor:
        _from_dlpack(x)
        carrier, seen = _seen(x)
        return carrier.to_wire(seen, name)

    def checked(self, x: Any) -> str:
        _from_dlpack(x)
        carrier, seen = _seen(x)
        return carrier.checked(seen)

    def quantize(self, x: Any, marked: bool) -> tuple[Any, Any]:
        """Arrays of the library that x is seen through."""
        carrier, seen = _seen(x)
        return carrier.quantize(seen, marked)

    def dtype(self, x: Any) -> str:
        carrier, seen = _seen(x)
        return carrier.dtype(seen)

    def memory(self, x: Any, name: str) -> Buffer:
        carrier, seen = _seen(x)
        return carrier.memory(seen, name)

    def from_wire(self, tensor: Tensor, like: Any) -> Any:
        carrier, seen = _seen(like)
        if tensor.datatype == "BF16" and carrier.name == "numpy":
            torch = sys.modules["torch"]  # `refuse` has seen to it
            carrier, seen = Torch(), torch.empty(0)
        return _from_dlpack(like)(carrier.from_wire(tensor, seen))

    def refuse(self, datatype: str) -> str | None:
        if datatype == "BF16" and not _has_torch():
            return "NumPy passes no bfloat16 on by DLPack: import torch, or ask for output_dtype='FP32'"
        return None


def _has_torch() -> bool:
    return "torch" in sys.modules


def _seen(x: Any) -> tuple[Framework, Any]:
    """x as an array of NumPy or torch, over its own memory. Errors: `InputError`."""
    if Torch().owns(x):
        return Torch(), x
    reason: Exception | None = None
    try:
        # First, because torch ends the process at a negative stride.
        if x.__dlpack_device__()[0] == _HOST:
            import numpy as np

            return NumPy(), x if NumPy().owns(x) else np.from_dlpack(x)
    except Exception as error:  # whatever x's own library raises
        reason = error
    try:
        if _has_torch():
            return Torch(), sys.modules["torch"].from_dlpack(x)
    except Exception as error:
        reason = error
    raise InputError(
        "memory_unsupported",
        f"x is of type {_kind(x)}, and cannot be seen by DLPack ({reason or 'on a device, without torch'}): "
        "import torch, which sees more than NumPy, or pass a NumPy array or a torch tensor of float32, "
        "float16 or bfloat16",
    ) from reason


def _from_dlpack(x: Any) -> Any:
    """The function that makes arrays like x. Errors: `InputError` where x's library names none."""
    namespace = getattr(x, "__array_namespace__", None)
    function = getattr(namespace(), "from_dlpack", None) if namespace is not None else None
    if function is None:
        raise InputError(
            "type_unsupported",
            f"x is of type {_kind(x)}, which has DLPack but names no library that y could go back to "
            "(__array_namespace__): pass numpy.from_dlpack(x) or torch.from_dlpack(x)",
        )
    return function


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__name__}"
