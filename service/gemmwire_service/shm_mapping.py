"""Objects of shared memory as memory, whose owner may take them away: shm_mapping.c."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path

import numpy as np

from .compiled import SHM_MAPPING, load


class Mapper:
    """Errors: NotCompiled; `folder` is that of `load`."""

    def __init__(self, folder: Path | None) -> None:
        library = load(SHM_MAPPING, folder).holding
        self._map = library.gemmwire_map
        self._map.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
        self.is_gone = library.gemmwire_is_gone
        self.unmap = library.gemmwire_unmap
        self.unmap.restype = None

    def map(self, file: int, nbytes: int) -> Mapping:
        """The first bytes of an open file. Errors: OSError."""
        start = ctypes.c_void_p()
        number: int = self._map(file, nbytes, ctypes.byref(start))
        if number < 0 or start.value is None:
            raise OSError(f"{nbytes} bytes cannot be mapped")
        return Mapping(self, number, start.value, nbytes)


class Mapping:
    """`data`: the bytes as they are, to be read only. What the object loses reads as zeros from then on, also
    if it grows again, and `gone` is true. It is kept for as long as anything has a part of `data`.
    """

    def __init__(self, mapper: Mapper, number: int, start: int, nbytes: int) -> None:
        memory = (ctypes.c_ubyte * nbytes).from_address(start)
        # Not at the end of the process, where another thread may be reading still.
        weakref.finalize(memory, mapper.unmap, number).atexit = False
        self.data: memoryview = np.frombuffer(memoryview(memory), np.uint8).data
        self._mapper = mapper
        self._number = number

    @property
    def gone(self) -> bool:
        return bool(self._mapper.is_gone(self._number))


class Loan:
    """A part of a mapping that is read in place: `data`, of an object that has to be `needed` bytes long."""

    def __init__(self, mapping: Mapping, file: int, offset: int, nbytes: int) -> None:
        self.data = mapping.data[offset : offset + nbytes]
        self._mapping = mapping
        self._file = file
        self.needed = offset + nbytes

    def is_whole(self) -> bool:
        """Whether all of it was there until now; the file has to be open still."""
        return not self._mapping.gone and os.fstat(self._file).st_size >= self.needed
