"""Tensors as JSON numbers <-> little-endian bytes.

JSON has no NaN or infinity: they travel as the strings "NaN", "Infinity" and "-Infinity". A number is
rounded to the datatype to nearest even, BF16 by way of FP32 as PyTorch does; a number that is finite in JSON
and not in the datatype is refused rather than turned into an infinity. NumPy is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import WireError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_SPELLED = '"NaN", "Infinity", "-Infinity"'
_FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_INTEGERS = {
    "BOOL": "|u1", "UINT8": "|u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "INT8": "|i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
}  # fmt: skip


def from_json(data: list[Any], datatype: str, shape: tuple[int, ...], where: str) -> bytes:
    """Flat or nested numbers -> row-major bytes. Errors: `shape_invalid`, `value_invalid`."""
    values = _flatten(data, shape, where)
    if datatype in _INTEGERS:
        return _integers(values, datatype, where)
    return _floats(values, datatype, where)


def to_json(data: bytes | bytearray | memoryview, datatype: str) -> list[Any]:
    """Row-major bytes -> flat list of numbers, non-finite ones as strings; every float is exact."""
    import numpy as np

    if datatype == "BF16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, _FLOATS.get(datatype) or _INTEGERS[datatype])
    if datatype == "BOOL":
        return [bool(value) for value in values.tolist()]
    result: list[Any] = values.tolist()
    if datatype not in _INTEGERS and not np.isfinite(values).all():
        for index in np.flatnonzero(~np.isfinite(values)).tolist():
            result[index] = _spell(result[index])
    return result


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """FP32 -> BF16 bit patterns, to nearest even; NaN stays NaN (quiet), overflow goes to infinity."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, ((bits >> 16) | 0x40).astype("<u2"), rounded)


def _spell(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _flatten(data: list[Any], shape: tuple[int, ...], where: str) -> Sequence[Any]:
    count = prod(shape)
    values: list[Any] = data
    if data and isinstance(data[0], list):
        for depth, size in enumerate(shape):
            rows = [values] if depth == 0 else values
            if not all(type(row) is list and len(row) == size for row in rows):
                _shape(
                    f"{where} has shape {list(shape)}, but at depth {depth} of 'data' not every entry is "
                    f"an array of {size}",
                    size,
                )
            values = list(chain.from_iterable(rows))
    if len(values) != count:
        _shape(
            f"{where} has shape {list(shape)}, {count} elements, but 'data' holds {len(values)}",
            count,
            len(values),
        )
    return values


def _floats(values: Sequence[Any], datatype: str, where: str) -> bytes:
    import numpy as np

    kinds = set(map(type, values))
    if not kinds <= {int, float, str}:
        _value(f"{where} is {datatype}; 'data' must hold numbers, or the strings {_SPELLED}")
    if str in kinds:
        finite = np.array([type(value) is not str for value in values])
        values = [_nonfinite(value, datatype, where) if type(value) is str else value for value in values]
    else:
        finite = np.ones(len(values), dtype=bool)
    try:
        wide = np.array(values, dtype="<f8").reshape(-1)
    except (OverflowError, ValueError):
        _value(f"{where}: 'data' holds a value that is not a number in the range of {datatype}")
    return _narrow(wide, finite, datatype, where)


def _nonfinite(text: str, datatype: str, where: str) -> float:
    if text not in _NONFINITE:
        _value(f"{where} is {datatype}; {text[:40]!r} is none of the strings {_SPELLED}")
    return _NONFINITE[text]


def _narrow(wide: NDArray[np.float64], finite: NDArray[np.bool_], datatype: str, where: str) -> bytes:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        if datatype == "BF16":
            bits = round_to_bf16(wide.astype("<f4"))
            narrow, overflowed = bits, (bits & 0x7F80) == 0x7F80
        else:
            floats = wide.astype(_FLOATS[datatype])
            narrow, overflowed = floats, ~np.isfinite(floats)
    lost = overflowed & finite
    if lost.any():
        index = int(np.flatnonzero(lost)[0])
        _value(
            f"{where}: element {index} of 'data' is {float(wide[index])!r}, beyond the range of {datatype}; "
            "scale it down or send a wider datatype"
        )
    return narrow.tobytes()


def _integers(values: Sequence[Any], datatype: str, where: str) -> bytes:
    import numpy as np

    wanted, words = (bool, "true and false") if datatype == "BOOL" else (int, "whole numbers")
    if not set(map(type, values)) <= {wanted}:
        _value(f"{where} is {datatype}; 'data' must hold {words} only")
    dtype = np.dtype(_INTEGERS[datatype])
    bounds = np.iinfo(dtype)
    # NumPy 1 wraps a number beyond the range, with no more than a warning.
    if values and not bounds.min <= min(values) <= max(values) <= bounds.max:
        _value(f"{where}: 'data' holds a number beyond the range of {datatype}")
    return np.array(values, dtype).tobytes()


def _shape(message: str, expected: object = None, got: object = None) -> NoReturn:
    raise WireError("shape_invalid", message[:1].upper() + message[1:], expected=expected, got=got)


def _value(message: str) -> NoReturn:
    raise WireError("value_invalid", message[:1].upper() + message[1:])
