"""Memory that a client shares with a server on its host: x goes in, y comes out, and HTTP carries neither.

An object loses its name as soon as the server has opened it, and the client keeps a lock on it (flock): so
nothing is left of it when the client ends, however that happens, and the server sees that it has ended.
Python's own `multiprocessing.shared_memory` would start a process that tidies up, and unlink what is in use.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
import weakref

from .errors import InvalidArgument
from .messages import Buffer, Shared

FOLDER = "/dev/shm"
_ALIGNED = 64  # bytes: where a tensor begins
_LEAST = 1 << 16  # bytes of an object


class Region:
    """An object of this process, mapped, and registered under its own name."""

    def __init__(self, prefix: str, nbytes: int) -> None:
        """Errors: `InvalidArgument` where this machine has no shared memory, or not as much."""
        self.name = f"{prefix}-{os.getpid()}-{secrets.token_hex(8)}"
        self.nbytes = nbytes
        self._path = os.path.join(FOLDER, self.name)
        try:
            self._map = _made(self._path, nbytes)
        except OSError as error:
            raise InvalidArgument(
                f"{nbytes} bytes of shared memory cannot be had: {error}; free some of {FOLDER}, make it "
                "larger, or call the client itself, which sends tensors in the body"
            ) from error
        # Closing the map closes the last descriptor of the object, and so gives up its lock.
        self.close = weakref.finalize(self, self._map.close)

    @property
    def key(self) -> str:
        return "/" + self.name

    def unlink(self) -> None:
        """Take its name away; what has it open keeps it."""
        os.unlink(self._path)

    def put(self, data: Buffer, offset: int) -> Shared:
        view = memoryview(data).cast("B")
        self._map[offset : offset + len(view)] = view
        return self.place(offset, len(view))

    def place(self, offset: int, nbytes: int) -> Shared:
        return Shared(self.name, offset, nbytes)

    def get(self, place: Shared) -> bytearray:
        with memoryview(self._map) as view:
            return bytearray(view[place.offset : place.offset + place.nbytes])


class Idle:
    """The regions of one client that no call uses, the one used last first. For threads."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._process = os.getpid()

    def take(self, nbytes: int) -> Region | None:
        """One of at least so many bytes."""
        if self._process != os.getpid():  # a fork: they are the parent's
            self._regions, self._process = [], os.getpid()
        try:
            region = self._regions.pop()
        except IndexError:
            return None
        if region.nbytes < nbytes:
            region.close()
            return None
        return region

    def put(self, region: Region) -> None:
        self._regions.append(region)

    def clear(self) -> list[Region]:
        regions, self._regions = self._regions, []
        return regions


def places(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin, one behind the other, and the size of what holds them all: a power
    of two, so that a client whose tensors grow does not make an object for each size."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += size + -size % _ALIGNED
    return offsets, max(_LEAST, 1 << (end - 1).bit_length() if end else 0)


def refuse_elsewhere() -> None:
    """Errors: `InvalidArgument` on a system without such memory."""
    if not sys.platform.startswith("linux") or not os.path.isdir(FOLDER):
        raise InvalidArgument(f"shared memory needs Linux and its {FOLDER}; call the client itself")


def _made(path: str, nbytes: int) -> mmap.mmap:
    import fcntl

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        # Else memory that is not there is told of by SIGBUS, at the first write.
        os.posix_fallocate(file, 0, nbytes)
        return mmap.mmap(file, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)
