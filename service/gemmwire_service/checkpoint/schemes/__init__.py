"""How the weights of a checkpoint are quantized, from what its config declares: one file per declaration.

SCHEMES is the list of what is read; a further scheme is one file and one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemmwire_service.checkpoint.schemes import compressed_tensors, fp8_blocks, modelopt, vendor
from gemmwire_service.checkpoint.schemes.base import UNDECLARED, Scheme
from gemmwire_service.errors import CheckpointError

__all__ = ["SCHEMES", "UNDECLARED", "Scheme", "find_scheme"]

SCHEMES: tuple[Callable[[Mapping[str, Any], object], Scheme | None], ...] = (
    modelopt.recognize,
    compressed_tensors.recognize,
    vendor.recognize,
    fp8_blocks.recognize,
)

# What tells one quantization from another; the message about a foreign one repeats these.
_TELLING_KEYS = (
    "quant_method",
    "quant_algo",
    "format",
    "data_type",
    "fmt",
    "bits",
    "group_size",
    "weight_block_size",
    "scale_fmt",
    "load_in_4bit",
)


def find_scheme(declared: Any, source: object) -> Scheme:
    """The scheme that a `quantization_config` declares. Raises CheckpointError for any that is not read."""
    if not declared:  # absent, null or {}
        return UNDECLARED
    if isinstance(declared, dict):
        for recognize in SCHEMES:
            scheme = recognize(declared, source)
            if scheme is not None:
                return scheme
    raise _foreign(declared, source)


def _foreign(declared: Any, source: object) -> CheckpointError:
    told = (
        {key: declared[key] for key in _TELLING_KEYS if key in declared}
        if isinstance(declared, dict)
        else declared
    )
    got = repr(told or declared)[:200]
    return CheckpointError(
        f"{source}: declares the quantization {got}. MXFP8 (E4M3 weight, one E8M0 scale per 32 along K, "
        "or per block of rows and columns) is read, and BF16, F16 and F32 weights are quantized to it; serve "
        "the unquantized model instead",
        expected="MXFP8 or no quantization",
        got=got,
    )
