"""Objects of shared memory as a client makes them, without the library that would tidy up behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PREFIX = f"gemmwire-test-{os.getpid()}"
FOLDER = "/dev/shm"


class Object:
    """An object of POSIX shared memory, open."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.key = "/" + name
        self.path = os.path.join(FOLDER, name)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self.file, nbytes)

    def put(self, data: bytes, offset: int = 0) -> None:
        assert os.pwrite(self.file, data, offset) == len(data)

    def get(self, nbytes: int, offset: int = 0) -> bytes:
        return os.pread(self.file, nbytes, offset)

    @property
    def size(self) -> int:
        return os.fstat(self.file).st_size

    def resize(self, nbytes: int) -> None:
        os.ftruncate(self.file, nbytes)

    def unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


@contextmanager
def made(nbytes: int = 1 << 16, name: str = "object") -> Iterator[Object]:
    """An object under PREFIX for the length of a block."""
    made = Object(f"{PREFIX}-{name}", nbytes)
    try:
        yield made
    finally:
        made.unlink()
        made.close()
