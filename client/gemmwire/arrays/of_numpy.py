"""NumPy arrays; bfloat16 is that of ml_dtypes."""

from __future__ import annotations

import sys
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from gemmwire.errors import InputError
from gemmwire.messages import Buffer, Tensor

from .framework import DATATYPES, NAMES, refuse_dtype, refuse_scalar

if TYPE_CHECKING:
    import numpy as np


class NumPy:
    name: ClassVar[str] = "numpy"

    def owns(self, x: object) -> bool:
        module = sys.modules.get("numpy")
        return module is not None and isinstance(x, (module.ndarray, module.generic))

    def to_wire(self, x: np.ndarray[Any, np.dtype[Any]], name: str) -> Tensor:
        return Tensor(name, self.checked(x), x.shape, self.memory(x, name))

    def quantize(
        self, x: np.ndarray[Any, np.dtype[Any]], marked: bool
    ) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, np.dtype[np.uint8]]]:
        import numpy as np

        from gemmwire.mxfp8 import BLOCK, bfloat16_bits, numpy_blocks

        self.checked(x)
        k = x.shape[-1]
        bits = bfloat16_bits(_native(x, "x"))
        if k % BLOCK:
            bits = np.pad(bits, [(0, 0)] * (x.ndim - 1) + [(0, -k % BLOCK)])
        codes, scales = numpy_blocks(bits.reshape(-1, BLOCK), marked)
        return codes.reshape(bits.shape)[..., :k], scales.reshape(*x.shape[:-1], -(-k // BLOCK))

    def checked(self, x: np.ndarray[Any, np.dtype[Any]]) -> str:
        datatype = DATATYPES.get(self.dtype(x))
        if datatype is None:
            refuse_dtype(x.dtype, "x.astype(numpy.float32)")
        refuse_scalar(x.ndim)
        return datatype

    def dtype(self, x: np.ndarray[Any, np.dtype[Any]]) -> str:
        name: str = x.dtype.name
        return name

    def memory(self, x: np.ndarray[Any, np.dtype[Any]], name: str) -> Buffer:
        import numpy as np

        data: Buffer = _native(x, name).reshape(-1).view(np.uint8).data
        return data

    def from_wire(self, tensor: Tensor, like: object) -> np.ndarray[Any, np.dtype[Any]]:
        import numpy as np

        dtype = _numpy_dtype(tensor.datatype)
        if not prod(tensor.shape):
            return np.empty(tensor.shape, dtype)
        y = np.frombuffer(tensor.data, np.uint8).view(dtype).reshape(tensor.shape)
        return y if y.flags.writeable and y.flags.aligned else y.copy()

    def refuse(self, datatype: str) -> str | None:
        try:
            _numpy_dtype(datatype)
        except ImportError:
            return (
                "NumPy has no bfloat16 of its own: pip install ml_dtypes, or ask for output_dtype='FP32', "
                "which holds every BF16 value"
            )
        return None


def _native(x: np.ndarray[Any, np.dtype[Any]], name: str) -> np.ndarray[Any, np.dtype[Any]]:
    """x contiguous and in this machine's byte order. Errors: `InputError`."""
    import numpy as np

    if isinstance(x, np.ma.MaskedArray):
        raise InputError(
            "memory_unsupported",
            f"{name} is a masked array, and a mask does not travel: pass {name}.filled(value)",
        )
    return np.ascontiguousarray(x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")))


def _numpy_dtype(datatype: str) -> np.dtype[Any]:
    import numpy as np

    if datatype != "BF16":
        return np.dtype(NAMES[datatype])
    from ml_dtypes import bfloat16

    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype
