"""Objects of the buffer protocol."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NoReturn

from gemmwire.errors import InputError
from gemmwire.messages import Buffer, Tensor

from .framework import refuse_scalar


class Buffers:
    """Objects of the buffer protocol whose format is C's float: array.array("f"), a memoryview, ..."""

    name: ClassVar[str] = "buffer"

    def owns(self, x: object) -> bool:
        try:
            memoryview(x)  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):
            return False
        return True

    def to_wire(self, x: Any, name: str) -> Tensor:
        return Tensor(name, self.checked(x), memoryview(x).shape or (), self.memory(x, name))

    def checked(self, x: Any) -> str:
        view = memoryview(x)
        if self.dtype(x) != "float32":
            raise InputError(
                "dtype_unsupported",
                f"x is a buffer of format {view.format!r}, and only float32 ('f') can be sent as a buffer: "
                "pass a NumPy array or a torch tensor of float32, float16 or bfloat16",
            )
        refuse_scalar(view.ndim)
        shape = view.shape or ()
        if not view.nbytes:
            raise InputError(
                "memory_unsupported",
                f"x is an empty buffer of shape {list(shape)}, and no buffer of y could have its shape: "
                "pass numpy.asarray(x)",
            )
        return "FP32"

    def quantize(self, x: Any, marked: bool) -> NoReturn:
        raise InputError("type_unsupported", "A buffer is not quantized by the client: pass numpy.asarray(x)")

    def dtype(self, x: Any) -> str:
        form = memoryview(x).format.removeprefix("@")
        if sys.byteorder == "little":
            form = form.removeprefix("<")  # ctypes' arrays
        return {"f": "float32", "B": "uint8"}.get(form, f"of format {form!r}")

    def memory(self, x: Any, name: str) -> Buffer:
        view = memoryview(x)
        castable = view.c_contiguous and not view.format.startswith("<")
        return view.cast("B") if castable else memoryview(view.tobytes())

    def from_wire(self, tensor: Tensor, like: object) -> memoryview[float]:
        data = memoryview(tensor.data)
        return (memoryview(bytearray(data)) if data.readonly else data).cast("f", tensor.shape)

    def refuse(self, datatype: str) -> str | None:
        if datatype == "FP32":
            return None
        return f"a buffer has no format for {datatype}: ask for output_dtype='FP32', or pass numpy.asarray(x)"
