"""The precisions that are compared: each is a way to compute the linear layers of a model, and nothing else.

Norms, attention, embeddings and softmax stay FP32 throughout, so that the differences are those of the layers
that a server takes over. Like a server, every precision but FP32 answers in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fidelity import floor
from gemmwire import Client
from gemmwire.nn import replace_linears
from gemmwire_service.mxfp8 import format as mxfp8

Rounding = Callable[[Tensor], Tensor]
Apply = Callable[[nn.Module, Client, str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Precision:
    """`apply(model, client, served)` gives the linears of `model` this precision until its block ends.

    `served` is the name under which the client's server has the model's layers.
    """

    name: str
    title: str
    apply: Apply


def to_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def to_mxfp8(x: Tensor) -> Tensor:
    """Through MXFP8 and back, from the dtype it has; FP32 [..., K]."""
    return _padded(x, lambda blocks: mxfp8.dequantize(*mxfp8.quantize(blocks)))


def to_mxfp8_floor(x: Tensor) -> Tensor:
    return _padded(x, lambda blocks: mxfp8.dequantize(*floor.quantize(blocks)))


def _padded(x: Tensor, rounding: Rounding) -> Tensor:
    k = x.shape[-1]
    return rounding(F.pad(x, (0, -k % mxfp8.BLOCK)))[..., :k]


class Rounded(nn.Module):
    """A linear layer on rounded operands, summed with its bias in FP32 and rounded once, to BF16."""

    def __init__(self, linear: nn.Linear, of_weight: Rounding, of_x: Rounding) -> None:
        super().__init__()
        self._weight = of_weight(linear.weight.detach())
        self._bias = linear.bias
        self._of_x = of_x

    def forward(self, x: Tensor) -> Tensor:
        return to_bf16(F.linear(self._of_x(to_bf16(x)), self._weight, self._bias))


@contextmanager
def rounded(model: nn.Module, of_weight: Rounding, of_x: Rounding) -> Iterator[None]:
    """Every `nn.Linear` of the model is a `Rounded` until the block ends."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        _put(model, name, Rounded(linear, of_weight, of_x))
    try:
        yield
    finally:
        for name, linear in linears.items():
            _put(model, name, linear)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _here(of_weight: Rounding, of_x: Rounding) -> Apply:
    return lambda model, client, served: rounded(model, of_weight, of_x)


@contextmanager
def _remote(model: nn.Module, client: Client, served: str) -> Iterator[None]:
    with replace_linears(model, client, served) as replaced:
        if replaced.left:
            raise RuntimeError(f"layers that are not measured: {replaced}")
        yield


REFERENCE = "fp32"
PRECISIONS = (
    Precision(REFERENCE, "FP32", lambda model, client, served: nullcontext()),
    Precision("bf16", "BF16", _here(to_bf16, to_bf16)),
    Precision("mxfp8_weights", "MXFP8 weights, BF16 x", _here(to_mxfp8, to_bf16)),
    Precision("mxfp8", "MXFP8 weights and x, by a server", _remote),
    Precision("mxfp8_floor", "the same, scales rounded down (OCP)", _here(to_mxfp8_floor, to_mxfp8_floor)),
)
