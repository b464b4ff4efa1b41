"""Arrays of the dtype that a command line names."""

from __future__ import annotations

from typing import Any

from gemmwire.arrays import NAMES
from gemmwire.errors import InvalidArgument


def converted(x: Any, datatype: str | None) -> Any:
    """x, a NumPy array, as FP32, FP16 or BF16; None leaves it. Errors: `InvalidArgument`."""
    if datatype is None:
        if x.dtype.name not in NAMES.values():
            raise InvalidArgument(f"x is {x.dtype.name}; --dtype FP32 (or FP16, BF16) has it converted")
        return x
    if datatype != "BF16":
        return x.astype(NAMES[datatype])
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise InvalidArgument(
            "--dtype BF16 needs ml_dtypes, NumPy's bfloat16: pip install ml_dtypes, or send FP32, which a "
            "server rounds to it"
        ) from None
    return x.astype(bfloat16)
