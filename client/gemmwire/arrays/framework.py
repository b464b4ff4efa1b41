"""What the client asks of a kind of array, and the refusals that all kinds share."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Protocol

from gemmwire.errors import InputError
from gemmwire.messages import Buffer, Tensor

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


def refuse_dtype(dtype: object, conversion: str) -> NoReturn:
    raise InputError(
        "dtype_unsupported", f"x is {dtype}; float32, float16 or bfloat16 is needed: pass {conversion}"
    )


def refuse_scalar(rank: int) -> None:
    if rank == 0:
        raise InputError(
            "rank_unsupported",
            "x has no dimensions; [..., K] is needed: pass x.reshape(1) for a layer of K=1",
        )
