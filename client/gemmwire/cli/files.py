"""Arrays in files: .npy, and one tensor of a .safetensors.

Formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html,
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gemmwire.errors import InvalidArgument
from gemmwire.safetensors import DTYPES, header

if TYPE_CHECKING:
    import numpy as np

Array = Any  # numpy.ndarray

_MAPPED_FROM = 1 << 20  # bytes; a smaller file is read
_LONGEST_HEADER = 100 << 20
_SUFFIXES = ".npy or .safetensors"
_NPY_BFLOAT16 = "|V2"  # how ml_dtypes' bfloat16 comes back from a .npy


def read(path: Path, name: str | None) -> Array:
    """The array of a file, from disk as it is used. `name`: of a tensor, needed where there are several.

    BF16 is ml_dtypes' bfloat16 where that is installed, else float32, which holds the same numbers.
    Errors: `InvalidArgument`, OSError.
    """
    if path.suffix == ".npy":
        return _read_npy(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, name)
    raise InvalidArgument(f"{path}: the file's name has to end with {_SUFFIXES}")


def check_writable(path: Path) -> None:
    """Errors: `InvalidArgument`, before the work whose result the file shall hold."""
    if path.suffix not in (".npy", ".safetensors"):
        raise InvalidArgument(f"{path}: the file's name has to end with {_SUFFIXES}")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise InvalidArgument(f"{path}: the folder {path.parent} cannot be written to; name another")


def write(path: Path, name: str, array: Array) -> None:
    """Write the array; in a .safetensors it has this name. A file that is there is replaced as a whole."""
    import numpy as np

    array = np.ascontiguousarray(array)
    with _replacing(path) as file:
        if path.suffix == ".npy":
            np.lib.format.write_array(file, array, allow_pickle=False)
            return
        dtype = {numpy: ours for ours, numpy in DTYPES.items()}[array.dtype.name]
        file.write(header([(name, dtype, array.shape, array.nbytes)]))
        file.write(array.reshape(-1).view(np.uint8).data)


def _read_npy(path: Path) -> Array:
    import numpy as np

    size = path.stat().st_size
    try:
        if size < _MAPPED_FROM:  # what is mapped cannot be larger than its file
            _refuse_larger(path, size)
        array = np.load(path, mmap_mode="r" if size >= _MAPPED_FROM else None, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # NumPy raises errors of all kinds over a file that is none
        what = error if _is_npy(path) else "it does not begin as one does"  # NumPy takes it for a pickle
        raise InvalidArgument(f"{path}: it is no .npy of numbers: {what}; numpy.save writes one") from error
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"{path}: it holds several arrays; one in a .npy is needed")
    return _bfloat16(array.view(np.uint16)) if array.dtype.str == _NPY_BFLOAT16 else array


def _is_npy(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(6) == b"\x93NUMPY"


def _refuse_larger(path: Path, size: int) -> None:
    """Errors: ValueError for an array that its file cannot hold, before NumPy makes room for it."""
    from numpy.lib import format as npy

    with path.open("rb") as file:
        begin = file.read(12)
        if not begin.startswith(npy.MAGIC_PREFIX):
            return
        wide = begin[6:8] != bytes((1, 0))  # from version 2 on
        if int.from_bytes(begin[8 : 12 if wide else 10], "little") > size:
            raise ValueError(f"its header is longer than its {size} bytes")
        file.seek(8)
        shape, _, dtype = (npy.read_array_header_2_0 if wide else npy.read_array_header_1_0)(file)
        if prod(shape) * dtype.itemsize > size:
            raise ValueError(f"{dtype} {list(shape)} is more than its {size} bytes")


def _read_safetensors(path: Path, name: str | None) -> Array:
    import numpy as np

    entries, start = _entries(path)
    if name is None and len(entries) != 1:
        raise InvalidArgument(f"{path}: it holds {_some(entries)}; say which with --tensor")
    name = next(iter(entries)) if name is None else name
    entry = entries.get(name)
    if entry is None:
        raise InvalidArgument(f"{path}: there is no tensor {name!r:.80}; it holds {_some(entries)}")
    try:
        dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{path}: the entry of {name!r:.80} cannot be read: {entry!r:.200}") from None
    if dtype not in DTYPES:
        raise InvalidArgument(
            f"{path}: {name!r} is {dtype}; {', '.join(DTYPES)} can be sent: convert it first"
        )
    stored = np.dtype(np.uint16 if dtype == "BF16" else DTYPES[dtype])
    size = prod(shape) * stored.itemsize
    if (
        min(shape, default=0) < 0
        or not 0 <= begin <= end <= path.stat().st_size - start
        or end - begin != size
    ):
        raise InvalidArgument(
            f"{path}: {name!r:.80} of shape {list(shape)} does not fit its place in the file"
        )
    array = np.memmap(path, stored, "r", start + begin, shape) if size else np.empty(shape, stored)
    return _bfloat16(array) if dtype == "BF16" else array


def _entries(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a .safetensors, and where their bytes begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # A read makes room for all it is asked for.
        there = length <= min(_LONGEST_HEADER, path.stat().st_size)
        text = file.read(length) if there else b""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise InvalidArgument(f"{path}: it does not begin as a .safetensors does")
    entries.pop("__metadata__", None)
    return entries, 8 + length


def _bfloat16(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> Array:
    import numpy as np

    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(bfloat16)


def _some(entries: dict[str, Any]) -> str:
    names = ", ".join(sorted(entries)[:8])
    return f"{names}, ... ({len(entries)} in all)" if len(entries) > 8 else names or "no tensor"


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
