"""The input of a layer: x as floats, or as the E4M3 codes and E8M0 scales of a client that quantized it."""

from __future__ import annotations

from typing import NamedTuple

from gemmwire.wire import InferRequest, Tensor, WireError

from .backends.base import LayerSpec
from .outputs import DATATYPES

INPUT = "x"
CODES, SCALES = "x_e4m3", "x_scale_e8m0"
QUANTIZED = "MXFP8"  # the datatype of x that came as codes [rows, K] and behind them scales [rows, blocks]
_BLOCK = 32


class Rows(NamedTuple):
    """`x` [..., K]; `in_place`: its bytes are those behind the JSON part, if they came as bytes."""

    x: Tensor
    in_place: bool

    @property
    def datatype(self) -> str:
        """Of y, where none is asked for: BF16 is what a quantized x was rounded to."""
        return "BF16" if self.x.datatype == QUANTIZED else self.x.datatype


def read_input(request: InferRequest, spec: LayerSpec) -> Rows:
    """Errors: WireError, each naming both sides."""
    by_name = {tensor.name: tensor for tensor in request.inputs}
    if CODES in by_name or SCALES in by_name:
        codes, scales = _take(by_name, (CODES, SCALES), request)
        return _quantized(codes, scales, spec, in_place=request.inputs[0].name == CODES)
    (x,) = _take(by_name, (INPUT,), request)
    if x.datatype not in DATATYPES:
        raise _dtype(x, DATATYPES)
    _refuse_other_k(x, spec)
    return Rows(x, in_place=True)


def _quantized(codes: Tensor, scales: Tensor, spec: LayerSpec, in_place: bool) -> Rows:
    for tensor in (codes, scales):
        if tensor.datatype != "UINT8":
            raise _dtype(tensor, ("UINT8",))
    _refuse_other_k(codes, spec)
    needed = (*codes.shape[:-1], -(-spec.k // _BLOCK))
    if scales.shape != needed:
        raise WireError(
            "shape_invalid",
            f"Input {SCALES!r} is {list(scales.shape)}; {list(needed)} is needed: one scale for each row of "
            f"{CODES!r} {list(codes.shape)} and {_BLOCK} elements of it",
            expected=list(needed),
            got=list(scales.shape),
        )
    return Rows(Tensor(INPUT, QUANTIZED, codes.shape, b"".join([codes.data, scales.data])), in_place)


def _take(by_name: dict[str, Tensor], names: tuple[str, ...], request: InferRequest) -> list[Tensor]:
    """The inputs of these names, and no others."""
    got = [tensor.name[:80] for tensor in request.inputs]
    needed = " and ".join(map(repr, names))
    for name in names:
        if name not in by_name:
            raise _names("input_missing", f"Input {name!r} is missing", needed, got, names)
    others = [name for name in by_name if name not in names]
    if others:
        what = f"Input {others[0][:80]!r} is not one of the layer's"
        raise _names("input_unexpected", what, needed, got, names)
    return [by_name[name] for name in names]


def _names(code: str, what: str, needed: str, got: list[str], names: tuple[str, ...]) -> WireError:
    either = needed if names != (INPUT,) else f"{needed}, or {CODES!r} and {SCALES!r}"
    return WireError(
        code, f"{what}: the request has {got}, the layer takes {either}", expected=list(names), got=got
    )


def _refuse_other_k(x: Tensor, spec: LayerSpec) -> None:
    if not x.shape:
        raise WireError(
            "rank_unsupported",
            f"Input {x.name!r} has no dimensions; layer {spec.name!r} takes [..., {spec.k}]",
            expected=f"[..., {spec.k}]",
            got="[]",
        )
    if x.shape[-1] != spec.k:
        raise WireError(
            "k_mismatch",
            f"Layer {spec.name!r} takes {x.name}[..., {spec.k}], but {x.name} is {list(x.shape)}: its last "
            f"dimension must be {spec.k}",
            expected=spec.k,
            got=x.shape[-1],
        )


def _dtype(x: Tensor, allowed: tuple[str, ...]) -> WireError:
    return WireError(
        "dtype_unsupported",
        f"Input {x.name!r} is {x.datatype}; it has to be {' or '.join(allowed)}: convert it first",
        expected=list(allowed),
        got=x.datatype[:40],
    )
