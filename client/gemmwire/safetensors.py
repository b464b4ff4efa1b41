"""The beginning of a safetensors file: https://github.com/huggingface/safetensors#format"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

# The format's name of each dtype that x and y can have, and NumPy's.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_ALIGNMENT = 64


def header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Of tensors (name, dtype, shape, bytes) that follow in this order, the first on a multiple of 64."""
    entries: dict[str, Any] = {}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
