"""One safetensors file, written tensor by tensor: all sizes are known before the first byte."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from gemmwire_service.checkpoint.safetensors_header import DTYPE_BITS, PREFIX
from gemmwire_service.checkpoint.shards import INDEX_SUFFIX, SUFFIX
from gemmwire_service.errors import OutputError

from .outline import Step, Stored

_ALIGNMENT = 8


def split(steps: Sequence[Step], limit: int) -> list[list[Step]]:
    """Steps in their order, in files of at most `limit` bytes of tensors; a larger one has its own file."""
    files: list[list[Step]] = []
    room = 0
    for step in steps:
        needed = sum(tensor.nbytes for tensor in step.tensors)
        if not files or needed > room:
            files.append([])
            room = limit
        files[-1].append(step)
        room -= needed
    return files


def file_names(count: int) -> list[str]:
    """As transformers names them."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def write_index(folder: Path, files: Sequence[str], shards: Sequence[Sequence[Step]]) -> None:
    """The index of several shards. OSError as it comes."""
    tensors = {
        tensor.name: (file, tensor.nbytes)
        for file, steps in zip(files, shards, strict=True)
        for step in steps
        for tensor in step.tensors
    }
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in tensors.values())},
        "weight_map": {name: tensors[name][0] for name in sorted(tensors)},
    }
    (folder / f"model{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class Shard:
    """A new file with room for `tensors`, which are written in any order. OSError as it comes.

    Its data is laid out as the reference implementation does: elements of more bytes first, so that each
    tensor is aligned, then by name.
    """

    def __init__(self, path: Path, tensors: Iterable[Stored]) -> None:
        self._path = path
        ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BITS[tensor.dtype], tensor.name))
        self._places = dict(_places(ordered))
        header = _header(ordered, self._places)
        self._data = PREFIX + len(header)
        self._end = self._data + sum(tensor.nbytes for tensor in ordered)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._write(len(header).to_bytes(PREFIX, "little") + header, 0)

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
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

    def _complete(self) -> None:
        """On the disk, and as long as the header says: an empty tensor at the end writes no byte."""
        os.ftruncate(self._file, self._end)
        os.fsync(self._file)


def _places(tensors: Iterable[Stored]) -> Iterator[tuple[str, tuple[int, int]]]:
    position = 0
    for tensor in tensors:
        yield tensor.name, (position, tensor.nbytes)
        position += tensor.nbytes


def _header(tensors: Sequence[Stored], places: dict[str, tuple[int, int]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without
    for tensor in tensors:
        start, nbytes = places[tensor.name]
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, start + nbytes],
        }
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % _ALIGNMENT)
