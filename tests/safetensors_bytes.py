"""safetensors containers made byte by byte, so that a test can make a wrong one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Entry = tuple[str, Sequence[int], bytes]


def frame(header: bytes | Mapping[str, Any], data: bytes = b"") -> bytes:
    """The header's length, the header as it is given, the data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def container(entries: Mapping[str, Entry]) -> bytes:
    """A well-formed container of name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in entries.items():
        header[name] = entry(dtype, shape, len(data), len(data) + len(raw))
        data += raw
    return frame(header, data)


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    """One tensor's part of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
