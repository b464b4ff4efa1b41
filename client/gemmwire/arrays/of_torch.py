"""torch tensors, of a CPU or another device."""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import TYPE_CHECKING, ClassVar

from gemmwire.errors import InputError
from gemmwire.messages import Buffer, Tensor

from .framework import DATATYPES, NAMES, refuse_dtype, refuse_scalar

if TYPE_CHECKING:
    import torch


class Torch:
    name: ClassVar[str] = "torch"

    def owns(self, x: object) -> bool:
        kind = getattr(sys.modules.get("torch"), "Tensor", None)
        return kind is not None and isinstance(x, kind)

    def to_wire(self, x: torch.Tensor, name: str) -> Tensor:
        return Tensor(name, self.checked(x), tuple(x.shape), self.memory(x, name))

    def quantize(self, x: torch.Tensor, marked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        from gemmwire.mxfp8 import BLOCK, torch_blocks

        self.checked(x)
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
            refuse_dtype(x.dtype, "x.to(torch.float32)")
        _refuse_hollow(x, "x")
        refuse_scalar(x.ndim)
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


def _refuse_hollow(x: torch.Tensor, name: str) -> None:
    """Errors: `InputError` for a tensor whose elements do not lie in memory, one after the other."""
    import torch

    if x.layout is not torch.strided or x.is_meta or x.is_nested:
        kind = "a meta tensor" if x.is_meta else "nested" if x.is_nested else f"of layout {x.layout}"
        raise InputError(
            "memory_unsupported", f"{name} is {kind}; a dense tensor that holds values is needed"
        )


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
