"""POSIX shared memory: objects under /dev/shm, which their owner has mapped and may change at any time.

The server reads and writes them as files: a read of what its owner has truncated comes back short, and is
refused. An x of many bytes is not copied at all, but read in place by the forward, where a mapping that
survives that can be had (16 MiB: 1.8 ms less of 5.4).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gemmwire.wire import Buffer, WireError

from .compiled import NotCompiled
from .shm import refuse_region
from .shm_mapping import Loan, Mapper
from .shm_mapping import Mapping as MappedFile

log = logging.getLogger("gemmwire.shm")

FOLDER = "/dev/shm"
_NAME = re.compile(r"/?([A-Za-z0-9][A-Za-z0-9._-]*)")
_IN_PLACE_FROM = 256 << 10  # bytes
# Bytes of an object: one with holes may be as large as all that a process can address.
_MAPPED_UP_TO = 64 << 30
_LONGEST = 255  # characters of a file's name
# Without O_NONBLOCK, one who has a lease (fcntl) on the object would hold up the event loop for 45 seconds.
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


class SystemMemory:
    """`nbytes` bytes from `offset` of an open object. `held`: its owner keeps a lock on it for as long as it
    lives (flock, shared); else it is used until it is unlinked."""

    kind: ClassVar[str] = "system"

    def __init__(
        self, file: int, key: str, offset: int, nbytes: int, held: bool, mapper: Mapper | None
    ) -> None:
        self.key = key
        self.offset = offset
        self._file = file
        self._nbytes = nbytes
        self._held = held
        self._mapper = mapper
        self._mapping: MappedFile | None = None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, target: memoryview, offset: int) -> None:
        at = 0
        while at < len(target):
            count = os.preadv(self._file, [target[at:]], self.offset + offset + at)
            if not count:
                self._refuse_shrunk(offset + len(target))
            at += count

    def lend(self, offset: int, nbytes: int) -> tuple[Buffer, Callable[[], None]] | None:
        mapping = self._mapped() if nbytes >= _IN_PLACE_FROM else None
        if mapping is None:
            return None
        loan = Loan(mapping, self._file, self.offset + offset, nbytes)
        self._refuse_broken(loan)
        return loan.data, partial(self._refuse_broken, loan)

    def _mapped(self) -> MappedFile | None:
        """The object as memory, from its first use on; None where it is copied."""
        end = self.offset + self._nbytes
        if self._mapping is not None and self._mapping.gone:
            # It shrank, or it has holes and there is no memory to fill them; read as a file they are zeros.
            self._mapping = self._mapper = None
        if self._mapping is None and self._mapper is not None and end <= _MAPPED_UP_TO:
            try:
                self._mapping = self._mapper.map(self._file, end)
            except OSError as error:
                log.warning("x is copied out of object %r: %s", self.key, error)
                self._mapper = None
        return self._mapping

    def _refuse_broken(self, loan: Loan) -> None:
        if loan.is_whole():
            return
        self._refuse_shrunk(loan.needed - self.offset, os.fstat(self._file).st_size)
        raise WireError(
            "region_gone",
            f"Object {self.key!r} could not be read: it was shorter meanwhile, or it has holes and {FOLDER} "
            "is full; send the request again",
            got=self.key,
        )

    def write(self, data: Buffer, offset: int) -> None:
        view = data if isinstance(data, bytes) else memoryview(data).cast("B")
        # A write beyond the end would make the object larger again.
        self._refuse_shrunk(offset + len(view), os.fstat(self._file).st_size)
        at = 0
        while at < len(view):
            try:
                at += os.pwrite(self._file, view[at:], self.offset + offset + at)
            except OSError as error:  # memory that was promised, and is not there
                raise WireError(
                    "region_gone", f"Object {self.key!r} cannot be written: {error.strerror}", got=self.key
                ) from None

    def facts(self) -> dict[str, Any]:
        return {"key": self.key, "offset": self.offset}

    def abandoned(self) -> bool:
        if self._held:
            return not is_held(self._file)
        return not os.fstat(self._file).st_nlink

    def close(self) -> None:
        os.close(self._file)
        self._mapping = None

    def _refuse_shrunk(self, needed: int, size: int = 0) -> None:
        if size < self.offset + needed:
            raise WireError(
                "region_gone",
                f"Object {self.key!r} has become shorter than what was registered of it; unregister the "
                "region, and register what there is",
                expected=f">= {self.offset + needed}",
                got=self.key,
            )


class SystemOpener:
    kind: ClassVar[str] = "system"

    def __init__(self, prefix: str, folder: Path | None = None) -> None:
        """`folder` is that of `load`."""
        self._prefix = prefix
        try:
            self._mapper: Mapper | None = Mapper(folder)
        except (NotCompiled, OSError) as error:
            log.warning("x in shared memory is copied instead of read in place: %s", error)
            self._mapper = None

    def open(self, form: Mapping[str, Any]) -> SystemMemory:
        place = form["key"], form["offset"], form["byte_size"]
        return open_system(self._prefix, *place, form["held"], self._mapper)


def open_system(
    prefix: str, key: str, offset: int, nbytes: int, held: bool, mapper: Mapper | None
) -> SystemMemory:
    """Open an object that a client has made. Errors: WireError `region_refused`, `region_range`.

    Its name is under the prefix, which is of clients alone: the server makes no object. Its owner is the
    user that the server runs as, and it is as large as the client says.
    """
    match = _NAME.fullmatch(key)
    if match is None or len(match[1]) > _LONGEST or not match[1].startswith(prefix):
        refuse_region(
            f"key is {key[:80]!r}; it must be the name of an object, begin with {prefix!r} and go on with "
            "letters, digits and '._-'",
            f"{prefix}*",
            key[:80],
        )
    name = match[1]
    try:
        file = os.open(os.path.join(FOLDER, name), _FLAGS)
    except OSError as error:
        refuse_region(f"key is {key[:80]!r}, which cannot be opened: {error.strerror}", "an object", key[:80])
    try:
        _refuse_foreign(os.fstat(file), key)
        _refuse_beyond(os.fstat(file).st_size, key, offset, nbytes)
        if held and not is_held(file):
            refuse_region(f"held is true, but nobody has a lock (flock) on {key[:80]!r}", "a lock", key[:80])
    except BaseException:
        os.close(file)
        raise
    return SystemMemory(file, key, offset, nbytes, held, mapper)


def is_held(file: int) -> bool:
    """Whether another has a lock on the object; the system takes it away from a process that ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def unavailable() -> str | None:
    """Why this machine has no such memory, or None."""
    if not sys.platform.startswith("linux") or not os.path.isdir(FOLDER):
        return f"shared memory needs Linux and its {FOLDER}"
    return None


def _refuse_foreign(facts: os.stat_result, key: str) -> None:
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        refuse_region(f"key is {key[:80]!r}, which is no object of shared memory", "an object", key[:80])
    if facts.st_uid != os.geteuid():
        refuse_region(
            f"key is {key[:80]!r}, an object of another user; the client must run as the server's user",
            "the server's user",
            key[:80],
        )


def _refuse_beyond(size: int, key: str, offset: int, nbytes: int) -> None:
    if offset + nbytes > size:
        raise WireError(
            "region_range",
            f"offset is {offset} and byte_size {nbytes}, {offset + nbytes} bytes together, but object "
            f"{key[:80]!r} has {size}",
            expected=f"<= {size}",
            got=offset + nbytes,
        )
