"""A safetensors file, written tensor by tensor: all sizes are known before the first byte."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gemmwire_service.checkpoint.safetensors_header import DTYPE_BITS, PREFIX
from gemmwire_service.errors import OutputError

_ALIGNMENT = 8


@dataclass(frozen=True)
class NewTensor:
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BITS[self.dtype] * math.prod(self.shape) // 8


class SafetensorsWriter:
    """A new file with room for `tensors`, which are written in any order. OSError as it comes.

    Its data is laid out as the reference implementation does: elements of more bytes first, so that each
    tensor is aligned, then by name.
    """

    def __init__(self, path: Path, tensors: Iterable[NewTensor], metadata: Mapping[str, str]) -> None:
        self._path = path
        ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name))
        self._places = dict(_places(ordered))
        header = _header(ordered, self._places, metadata)
        self._data = PREFIX + len(header)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._write(len(header).to_bytes(PREFIX, "little") + header, 0)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def put(self, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """The bytes of one tensor, in parts. Raises OutputError unless they are as many as it takes."""
        start, nbytes = self._places[name]
        done = 0
        for part in parts:
            self._write(part, self._data + start + done)
            done += len(part)
        if done != nbytes:
            raise OutputError(f"{self._path}: {done} bytes were written of {name}, which takes {nbytes}")

    def _write(self, content: bytes | bytearray | memoryview, position: int) -> None:
        with memoryview(content) as view:
            done = 0
            while done < len(view):
                done += os.pwrite(self._file, view[done:], position + done)


def _places(tensors: Iterable[NewTensor]) -> Iterator[tuple[str, tuple[int, int]]]:
    position = 0
    for tensor in tensors:
        yield tensor.name, (position, tensor.nbytes)
        position += tensor.nbytes


def _header(
    tensors: Sequence[NewTensor], places: dict[str, tuple[int, int]], metadata: Mapping[str, str]
) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for tensor in tensors:
        start, nbytes = places[tensor.name]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + nbytes],
        }
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % _ALIGNMENT)
