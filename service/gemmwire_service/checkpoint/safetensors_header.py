"""The header of the safetensors container: 8 bytes of length, a JSON object, then the tensors end to end.

Format: https://github.com/huggingface/safetensors#format. Sizes are Python integers throughout, so that a
shape of 2^62 x 2^62 is a large number and not a small one. Stricter than the reference reader in one point: a
key given twice is refused, because readers differ in which of the two they take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemmwire_service.checkpoint.base import listed, shown
from gemmwire_service.checkpoint.json_object import parse_object
from gemmwire_service.errors import CheckpointError

PREFIX = 8  # bytes of the header's length, little-endian
HEADER_LIMIT = 100_000_000  # bytes; the bound of the reference implementation
_SIZE_LIMIT = 1 << 63

# Every dtype of the format, in bits per element. The ones below a byte are packed.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the header. `start` counts bytes from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {_numbers(self.shape)}"


def header_length(prefix: bytes, size: int, source: object) -> int:
    """Length of the JSON header in a container of `size` bytes that begins with `prefix`."""
    if size < PREFIX or len(prefix) < PREFIX:
        what = "is empty" if size == 0 else f"is truncated: it has {size} bytes"
        raise CheckpointError(
            f"{source}: {what}; a safetensors file begins with the 8 bytes of its header's length",
            expected=f"at least {PREFIX} bytes",
            got=size,
        )
    length = int.from_bytes(prefix[:PREFIX], "little")
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{source}: a header of {length} bytes is declared; the bound is {HEADER_LIMIT}. "
            "This is not a safetensors file, or its beginning is damaged",
            expected=f"at most {HEADER_LIMIT}",
            got=length,
        )
    if length > size - PREFIX:
        raise CheckpointError(
            f"{source}: a header of {length} bytes is declared, and {size - PREFIX} bytes follow; "
            "the file is truncated: fetch or write it again",
            expected=length,
            got=size - PREFIX,
        )
    return length


class Header(NamedTuple):
    """What a header holds: tensors in the order of their bytes, and the free text that its writer added."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def parse_header(raw: bytes, data_size: int, source: object) -> dict[str, TensorInfo]:
    """The tensors of `read_header` alone."""
    return read_header(raw, data_size, source).tensors


def read_header(raw: bytes, data_size: int, source: object) -> Header:
    """The tensors that a JSON header describes, and its __metadata__.

    `data_size` is the number of bytes after the header. Raises CheckpointError, and nothing else, when the
    header is not exactly a description of that many bytes.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError(
            f"{source}: the header begins with {raw[:8]!r} and not with '{{'; this is not a safetensors file",
            expected="{",
            got=repr(raw[:8]),
        )
    entries = parse_object(raw, f"{source}: header", strict=True)
    metadata = _metadata(entries.pop("__metadata__", None), source)
    tensors = [_entry(name, entry, data_size, source) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.start, info.nbytes))
    _check_coverage(tensors, data_size, source)
    return Header({info.name: info for info in tensors}, metadata)


def _metadata(metadata: Any, source: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{source}: __metadata__ must map strings to strings",
            expected="object of strings",
            got=_kind(metadata),
        )
    return metadata


def _entry(name: str, entry: Any, data_size: int, source: object) -> TensorInfo:
    where = f"{source}: tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its header entry is {_kind(entry)}, an object is needed")
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if missing:
        raise CheckpointError(f"{where}: its header entry lacks {', '.join(missing)}")
    dtype = _dtype(entry["dtype"], where)
    shape = _sizes(entry["shape"], "shape", where)
    start, end = _offsets(entry["data_offsets"], data_size, where)
    _check_bytes(dtype, shape, end - start, where)
    return TensorInfo(name, dtype, shape, start, end - start)


def _dtype(dtype: Any, where: str) -> str:
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        got = shown(dtype) if isinstance(dtype, str) else _kind(dtype)
        raise CheckpointError(
            f"{where}: dtype {got} is not one of the format: {', '.join(DTYPE_BITS)}",
            expected=list(DTYPE_BITS),
            got=got,
        )
    return dtype


def _sizes(values: Any, what: str, where: str) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise CheckpointError(f"{where}: {what} is {_kind(values)}, a list of integers is needed")
    for value in values:
        # bool is an int in Python and is not one in JSON
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _SIZE_LIMIT:
            raise CheckpointError(
                f"{where}: {what} holds {repr(value)[:40]}; integers from 0 to 2^63 - 1 are needed",
                expected="0 <= size < 2^63",
                got=repr(value)[:40],
            )
    return tuple(values)


def _offsets(values: Any, data_size: int, where: str) -> tuple[int, int]:
    sizes = _sizes(values, "data_offsets", where)
    if len(sizes) != 2 or sizes[0] > sizes[1]:
        raise CheckpointError(
            f"{where}: data_offsets {_numbers(sizes)} is not [begin, end] with begin <= end",
            expected="[begin, end]",
            got=_numbers(sizes),
        )
    if sizes[1] > data_size:
        raise CheckpointError(
            f"{where}: its bytes {sizes[0]} to {sizes[1]} run past the end of its {data_size} bytes of data; "
            "the file is truncated: fetch or write it again",
            expected=sizes[1],
            got=data_size,
        )
    return sizes[0], sizes[1]


def _check_bytes(dtype: str, shape: tuple[int, ...], nbytes: int, where: str) -> None:
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits > _SIZE_LIMIT << 10:  # far beyond any file: a header may list a million sizes of 2^62
            break
    if bits != 8 * nbytes:
        needed = f"{bits // 8} bytes" + (f" and {bits % 8} bits" if bits % 8 else "")
        raise CheckpointError(
            f"{where}: {dtype} {_numbers(shape)} takes {needed}; its data_offsets give it {nbytes}",
            expected=needed,
            got=nbytes,
        )


def _check_coverage(tensors: Iterable[TensorInfo], data_size: int, source: object) -> None:
    """Refuses ranges (sorted by their beginning) that overlap or leave bytes to nobody."""
    position, before = 0, "the header"
    for info in tensors:
        if info.start < position:
            raise CheckpointError(
                f"{source}: tensor {shown(info.name)} begins at byte {info.start} and {before} ends at "
                f"{position}; tensors must not overlap",
                expected=position,
                got=info.start,
            )
        if info.start > position:
            raise CheckpointError(
                f"{source}: bytes {position} to {info.start}, between {before} and tensor "
                f"{shown(info.name)}, belong to no tensor; no hole is allowed",
                expected=position,
                got=info.start,
            )
        position, before = info.start + info.nbytes, f"tensor {shown(info.name)}"
    if position != data_size:
        raise CheckpointError(
            f"{source}: {data_size - position} bytes after {before} belong to no tensor; no hole is allowed",
            expected=position,
            got=data_size,
        )


def _numbers(sizes: tuple[int, ...]) -> str:
    return f"[{listed([str(size) for size in sizes])}]"


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
