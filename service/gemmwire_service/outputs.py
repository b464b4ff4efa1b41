"""The outputs of a layer: y, and of a fused layer also the columns of y that each of its parts answers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemmwire.wire import Buffer, InferRequest, RequestedOutput, Shared, WireError

from .backends.base import LayerSpec

OUTPUT = "y"
DATATYPES = ("BF16", "FP16", "FP32")


class Columns(NamedTuple):
    """One output that a request asks for: columns start..stop of y, and whether they travel as bytes.

    `shared`: where in shared memory the client wants them, instead of in the answer.
    """

    name: str
    start: int
    stop: int
    binary: bool
    shared: Shared | None = None


class Outputs(NamedTuple):
    """What comes back, in the request's order, all of it in one datatype."""

    datatype: str
    columns: tuple[Columns, ...]


def read_outputs(request: InferRequest, spec: LayerSpec, datatype: str) -> Outputs:
    """`datatype` is that of an output which names none. No outputs, or an empty list, asks for every one.

    Errors: WireError `output_unknown`, `dtype_unsupported`.
    """
    bounds = {OUTPUT: (0, spec.n)} | {part.name: (part.start, part.stop) for part in spec.parts}
    asked = request.outputs or tuple(RequestedOutput(name) for name in bounds)
    for output in asked:
        if output.name not in bounds:
            raise _unknown(output.name, list(bounds))
    datatypes = {output.datatype or datatype for output in asked}
    if len(datatypes) > 1:
        raise WireError(
            "dtype_unsupported",
            f"The outputs are asked for as {', '.join(sorted(datatypes))[:80]}; they come from one forward, "
            "in one datatype: ask for the same, or send two requests",
            expected="one datatype",
            got=sorted(datatypes)[:4],
        )
    columns = [
        Columns(each.name, *bounds[each.name], _as_bytes(each, request.binary_outputs), each.shared)
        for each in asked
    ]
    return Outputs(datatypes.pop(), tuple(columns))


def _as_bytes(output: RequestedOutput, default: bool) -> bool:
    return output.shared is not None or (default if output.binary is None else output.binary)


def cut(data: Buffer, rows: int, n: int, columns: Columns) -> Buffer:
    """`data` holds [rows, n] elements of any size -> those of some columns, [rows, stop - start]."""
    if not rows or (columns.start, columns.stop) == (0, n):
        return data
    whole = np.frombuffer(data, dtype=np.uint8).reshape(rows, n, -1)
    return np.ascontiguousarray(whole[:, columns.start : columns.stop]).data.cast("B")


def _unknown(name: str, known: list[str]) -> WireError:
    return WireError(
        "output_unknown",
        f"Output {name[:80]!r} is not one of the layer's; it has {', '.join(map(repr, known))}",
        expected=known,
        got=name[:80],
    )
