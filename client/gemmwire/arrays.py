"""NumPy arrays, torch tensors and buffers <-> wire tensors.

x may be float32, float16 or bfloat16, of any rank from 1, with any strides: rows are made contiguous, and an
array that is contiguous already is sent from its own memory. y comes back in x's framework, and for torch on
x's device, over the memory that received it. NumPy and torch are never imported for an object of the other:
an array of either can only come from a caller that has imported it.
"""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from .errors import InputError, InvalidArgument
from .messages import Buffer, Tensor

if TYPE_CHECKING:
    import numpy as np
    import torch

NAMES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
DATATYPES = {name: datatype for datatype, name in NAMES.items()}


class Framework(Protocol):
    """Where arrays come from and go back to."""

    name: ClassVar[str]

    def owns(self, x: object) -> bool: ...

    def to_wire(self, x: Any, name: str) -> Tensor:
        """x as a wire tensor over its own memory where that is contiguous. Errors: `InputError`."""
        ...

    def checked(self, x: Any) -> str:
        """The wire's name of x's dtype. Errors: `InputError` for what is not sent as x."""
        ...

    def quantize(self, x: Any, marked: bool) -> tuple[Any, Any]:
        """As `mxfp8.quantize`."""
        ...

    def dtype(self, x: Any) -> str:
        """The name that NumPy and torch have for the type of x's elements: "float32", "float8_e4m3fn", ..."""
        ...

    def memory(self, x: Any, name: str) -> Buffer:
        """The elements of x, row-major and little-endian, in x's own memory where they lie so.

        Errors: `InputError`, calling x by its `name`.
        """
        ...

    def from_wire(self, tensor: Tensor, like: Any) -> Any:
        """The tensor as an array beside `like`, over the tensor's own memory where that is writable."""
        ...

    def refuse(self, datatype: str) -> str | None:
        """Why no array of this datatype can be made here, or None."""
        ...


def framework_of(x: object, name: str = "x") -> Framework:
    """Errors: `InputError` (`type_unsupported`) for a list, a scalar, a data frame, ..."""
    for framework in FRAMEWORKS:
        if framework.owns(x):
            return framework
    raise InputError(
        "type_unsupported",
        f"{name} is of type {type(x).__name__}; a NumPy array, a torch tensor or a buffer of float32 "
        f"is needed: pass numpy.asarray({name}, dtype=numpy.float32)",
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


class Torch:
    name: ClassVar[str] = "torch"

    def owns(self, x: object) -> bool:
        kind = getattr(sys.modules.get("torch"), "Tensor", None)
        return kind is not None and isinstance(x, kind)

    def to_wire(self, x: torch.Tensor, name: str) -> Tensor:
        return Tensor(name, self.checked(x), tuple(x.shape), self.memory(x, name))

    def quantize(self, x: torch.Tensor, marked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        from .mxfp8 import BLOCK, torch_blocks

        self.checked(x)
        _refuse_hollow(x, "x")
        k = x.shape[-1]
        rows = x.detach().to(torch.bfloat16)
        if k % BLOCK:
            rows = torch.nn.functional.pad(rows, (0, -k % BLOCK))
        codes, scales = torch_blocks(rows.reshape(-1, BLOCK), marked)
        return codes.view(rows.shape)[..., :k], scales.view(*x.shape[:-1], -(-k // BLOCK))

    def checked(self, x: torch.Tensor) -> str:
        import torch

        datatype = DATATYPES.get(self.dtype(x))
        if datatype is None:
            _refuse_dtype(x.dtype, "x.to(torch.float32)")
        _refuse_scalar(x.ndim)
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "grad_unsupported",
                "x requires grad, and no gradient comes back from a server: pass x.detach(), or call under "
                "torch.no_grad()",
            )
        return datatype

    def dtype(self, x: torch.Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def memory(self, x: torch.Tensor, name: str) -> Buffer:
        _refuse_hollow(x, name)
        try:
            return _torch_memory(x.detach().cpu().resolve_neg().contiguous())
        except RuntimeError as error:  # a fake or functional tensor: it has a shape, and no values to send
            raise InputError(
                "memory_unsupported",
                f"{name} is a {type(x).__name__} whose values cannot be read ({error}); pass a plain tensor, "
                "or put the call into a compiled model as torch.ops.gemmwire.remote_linear (import "
                "gemmwire.nn)",
            ) from error

    def from_wire(self, tensor: Tensor, like: torch.Tensor) -> torch.Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, NAMES[tensor.datatype])
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=dtype, device=like.device)
        data = memoryview(tensor.data)
        y = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
        if y.data_ptr() % dtype.itemsize:
            y = y.clone()
        return y.view(tensor.shape).to(like.device)

    def refuse(self, datatype: str) -> str | None:
        return None


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

        from .mxfp8 import BLOCK, bfloat16_bits, numpy_blocks

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
            _refuse_dtype(x.dtype, "x.astype(numpy.float32)")
        _refuse_scalar(x.ndim)
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
        _refuse_scalar(view.ndim)
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
        return {"f": "float32", "B": "uint8"}.get(form, f"of format {form!r}")

    def memory(self, x: Any, name: str) -> Buffer:
        view = memoryview(x)
        return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())

    def from_wire(self, tensor: Tensor, like: object) -> memoryview[float]:
        data = memoryview(tensor.data)
        return (memoryview(bytearray(data)) if data.readonly else data).cast("f", tensor.shape)

    def refuse(self, datatype: str) -> str | None:
        if datatype == "FP32":
            return None
        return f"a buffer has no format for {datatype}: ask for output_dtype='FP32', or pass numpy.asarray(x)"


# A torch tensor and a NumPy array may offer the buffer protocol too, so those come first.
FRAMEWORKS: tuple[Framework, ...] = (Torch(), NumPy(), Buffers())


def _refuse_dtype(dtype: object, conversion: str) -> NoReturn:
    raise InputError(
        "dtype_unsupported", f"x is {dtype}; float32, float16 or bfloat16 is needed: pass {conversion}"
    )


def _refuse_scalar(rank: int) -> None:
    if rank == 0:
        raise InputError(
            "rank_unsupported",
            "x has no dimensions; [..., K] is needed: pass x.reshape(1) for a layer of K=1",
        )


def _refuse_hollow(x: torch.Tensor, name: str) -> None:
    """Errors: `InputError` for a tensor whose elements do not lie in memory, one after the other."""
    import torch

    if x.layout is not torch.strided or x.is_meta:
        kind = "a meta tensor" if x.is_meta else f"of layout {x.layout}"
        raise InputError(
            "memory_unsupported", f"{name} is {kind}; a dense tensor that holds values is needed"
        )


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


def _torch_memory(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place; the view keeps the tensor's storage alive."""
    import torch

    if not x.numel():
        return memoryview(b"")
    flat = x.view(-1).view(torch.uint8)
    try:
        return flat.numpy().data
    except RuntimeError as error:
        if "Numpy is not available" not in str(error):
            raise
        # This torch was built without NumPy, or finds none: one copy.
        return memoryview(ctypes.string_at(flat.data_ptr(), flat.numel()))
