"""One safetensors file on disk: its header in memory, its tensors read one at a time.

Tensors are read into memory of their own and never mapped. A mapping of a file that another program shortens
kills the process with SIGBUS; a read of it comes back short, which is an error that a server survives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from gemmwire_service.checkpoint.base import shown
from gemmwire_service.checkpoint.regular_file import open_regular
from gemmwire_service.checkpoint.safetensors_header import PREFIX, header_length, read_header
from gemmwire_service.errors import CheckpointError

# E8M0 scales are exponents in a byte: they are read as bytes whatever the file calls them.
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
}

_CHUNK = 8 << 20  # bytes of a tensor that is copied, not used


class SafetensorsFile:
    """The container at `path`. `tensors` maps names to dtype, shape and bytes, in the order of the bytes;
    `metadata` is the free text of its header; `identity` changes when the file does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            self.identity = _identity(status)
            prefix = _read(file, min(PREFIX, status.st_size), path)
            length = header_length(bytes(prefix), status.st_size, path)
            header = bytes(_read(file, length, path))
        self._data = PREFIX + length
        self.tensors, self.metadata = read_header(header, status.st_size - self._data, path)

    def load(self, name: str) -> Tensor:
        """A copy of one tensor, on the CPU. Raises CheckpointError if the file changed since."""
        info = self.tensors[name]
        with open_regular(self.path) as file:
            self._check_unchanged(os.fstat(file.fileno()))
            file.seek(self._data + info.start)
            buffer = _read(file, info.nbytes, self.path)
            self._check_unchanged(os.fstat(file.fileno()))
        dtype = TORCH_DTYPES[info.dtype]
        return (torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)).reshape(
            info.shape
        )

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """Some rows of a matrix [N, K], as a copy [len(indices), K]. Raises as `load` does."""
        info = self.tensors[name]
        step = info.nbytes // info.shape[0]
        buffer = bytearray()
        with open_regular(self.path) as file:
            for index in indices:
                file.seek(self._data + info.start + index * step)
                buffer += _read(file, step, self.path)
            self._check_unchanged(os.fstat(file.fileno()))
        return torch.frombuffer(buffer, dtype=TORCH_DTYPES[info.dtype]).reshape(len(indices), info.shape[1])

    def chunks(self, name: str, size: int = _CHUNK) -> Iterator[bytearray]:
        """The bytes of one tensor, of whatever dtype, `size` at a time. Raises as `load` does."""
        info = self.tensors[name]
        with open_regular(self.path) as file:
            for done in range(0, info.nbytes, size):
                self._check_unchanged(os.fstat(file.fileno()))
                file.seek(self._data + info.start + done)
                yield _read(file, min(size, info.nbytes - done), self.path)
            self._check_unchanged(os.fstat(file.fileno()))

    def where(self, name: str) -> str:
        """`file: tensor 'name'`, the beginning of a message about one tensor."""
        return f"{self.path}: tensor {shown(name)}"

    def _check_unchanged(self, status: os.stat_result) -> None:
        if _identity(status) != self.identity:
            raise CheckpointError(
                f"{self.path}: changed since it was opened (it had {self.identity[2]} bytes and has "
                f"{status.st_size}); load it again when its writer has finished",
                expected=self.identity[2],
                got=status.st_size,
            )


def _read(file: FileIO, size: int, path: Path) -> bytearray:
    """Exactly `size` bytes. A bytearray, because torch warns about tensors over memory that is read-only."""
    buffer = bytearray(size)
    done = 0
    try:
        with memoryview(buffer) as view:
            while done < size and (got := file.readinto(view[done:])):
                done += got
    except OSError as error:
        raise CheckpointError(f"{path}: reading failed: {error.strerror or error}") from None
    if done != size:
        raise CheckpointError(
            f"{path}: ended {size - done} bytes early while it was read; load it again when it is complete",
            expected=size,
            got=done,
        )
    return buffer


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
