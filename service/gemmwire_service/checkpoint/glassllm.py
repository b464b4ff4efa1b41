"""Linear layers of the small language models that the PyPI package `glassllm` carries, and of its npz format.

The npz holds FP16 arrays [in, out] under their parameter names, `E` [vocab, d] that is both the embedding and
(tied) the output layer, vectors `*.gamma`, and `__config__`, a JSON string. The package is located and not
imported: its weights are needed here, its code is not.
"""

from __future__ import annotations

import importlib.util
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from gemmwire_service.checkpoint.base import (
    LayerShape,
    LayerWeights,
    Skipped,
    layer_name,
    listed,
    no_layer,
    shown,
    unknown_layer,
)
from gemmwire_service.checkpoint.float_layer import check_finite, quantize_layer
from gemmwire_service.checkpoint.json_object import parse_object
from gemmwire_service.checkpoint.regular_file import open_regular
from gemmwire_service.errors import CheckpointError

PACKAGE = "glassllm"
DEFAULT_LANGUAGE = "en"
EMBEDDING, HEAD, CONFIG = "E", "lm_head", "__config__"
_DTYPES = ("float16", "float32")
_SUFFIX = ".npy"
_DEFLATE_AT_BEST = 1032  # bytes out of one


class _Array(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def is_installed_name(path: Path) -> bool:
    """Whether `path` is `glassllm` or `glassllm:<language>`, which name the installed package and no file."""
    return str(path).partition(":")[0] == PACKAGE


def installed_weights(language: str = DEFAULT_LANGUAGE) -> Path:
    """The npz of the installed package. Raises CheckpointError naming the extra when it is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) / "weights" for place in (spec.submodule_search_locations or ())] if spec else []
    files = {file.stem: file for folder in folders for file in sorted(folder.glob("*.npz"))}
    if not files:
        raise CheckpointError(
            f"{PACKAGE}: the package is not installed; pip install 'gemmwire[demo]', or give the path "
            "of a checkpoint",
            expected=f"the package {PACKAGE}",
            got="not installed",
        )
    if language not in files:
        raise CheckpointError(
            f"{PACKAGE}:{language[:40]}: the installed package has {listed(sorted(files))}",
            expected=sorted(files),
            got=language[:40],
        )
    return files[language]


class GlassllmCheckpoint:
    """A `Checkpoint` over an npz of glassllm, or over the installed package by its name."""

    format = "glassllm"

    def __init__(self, path: Path) -> None:
        installed = is_installed_name(path)
        self._path = installed_weights(str(path).partition(":")[2] or DEFAULT_LANGUAGE) if installed else path
        self._arrays = _read_headers(self._path)
        self._check_config()
        reasons = {name: _reason_against(name, array) for name, array in self._arrays.items()}
        self._stored = {
            layer_name(HEAD if name == EMBEDDING else name, self._path): name
            for name, reason in reasons.items()
            if reason is None
        }
        self.skipped = tuple(Skipped(name, reason) for name, reason in reasons.items() if reason is not None)
        if not self._stored:
            raise no_layer(self.skipped, self._path)
        transposed = "weights are stored [in, out] and transposed"
        tied = (
            f"but {EMBEDDING} {self._arrays[EMBEDDING]}: the embedding, tied to the output, served as {HEAD}"
        )
        self.notes = (f"{transposed}, {tied}" if HEAD in self._stored else transposed,)

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def spec(self, name: str) -> LayerShape:
        stored = self._name_in_file(name)
        rows, columns = self._arrays[stored].shape
        return LayerShape(rows, columns, False) if stored == EMBEDDING else LayerShape(columns, rows, False)

    def nbytes(self, name: str) -> int:
        array = self._arrays[self._name_in_file(name)]
        return math.prod(array.shape) * array.dtype.itemsize

    def read(self, name: str) -> LayerWeights:
        return quantize_layer(name, self.unquantized(name), None)

    def has_unquantized(self, name: str) -> bool:
        return bool(self._name_in_file(name))

    def unquantized(self, name: str) -> Tensor:
        stored = self._name_in_file(name)
        weight = check_finite(self._load(stored), self._where(stored))
        return weight if stored == EMBEDDING else weight.T.contiguous()

    def _name_in_file(self, name: str) -> str:
        if name not in self._stored:
            raise unknown_layer(name, self._stored, self._path)
        return self._stored[name]

    def _where(self, stored: str) -> str:
        return f"{self._path}: array {shown(stored)}"

    def _load(self, stored: str) -> Tensor:
        array = _read_array(self._path, stored)
        if (array.dtype, array.shape) != self._arrays[stored]:
            raise CheckpointError(f"{self._where(stored)}: changed since the file was opened; load it again")
        return torch.from_numpy(np.ascontiguousarray(array))

    def _check_config(self) -> None:
        """The file is glassllm's if it has a `__config__` and an `E` of the size that this states."""
        missing = [name for name in (CONFIG, EMBEDDING) if name not in self._arrays]
        if missing or HEAD in self._arrays:
            what = f"lacks {' and '.join(missing)}" if missing else f"has {HEAD} beside the tied {EMBEDDING}"
            raise CheckpointError(f"{self._path}: {what}; an npz is read only as written by {PACKAGE}")
        text = str(_read_array(self._path, CONFIG))
        config = parse_object(text.encode("utf-8", "replace"), f"{self._path}: {CONFIG}", strict=True)
        declared, shape = (config.get("vocab_size"), config.get("d_model")), self._arrays[EMBEDDING].shape
        if shape != declared:
            raise CheckpointError(
                f"{self._where(EMBEDDING)} is {list(shape)}; {CONFIG} has vocab_size, d_model {declared}",
                expected=list(declared),
                got=list(shape),
            )


def _reason_against(name: str, array: _Array) -> str | None:
    """Why an array is not a served weight, or None: it is."""
    if name == CONFIG:
        return "is the configuration, a JSON string"
    if len(array.shape) != 2:
        return f"is {len(array.shape)}-D (a vector, as of a norm); a linear layer's weight is 2-D"
    if 0 in array.shape:
        return f"has no elements: {array}"
    if array.dtype not in [np.dtype(name) for name in _DTYPES]:
        return f"is {array.dtype.str}; {' or '.join(_DTYPES)} in this machine's byte order is read"
    return None


def _read_headers(path: Path) -> dict[str, _Array]:
    """dtype and shape of each array, checked against the bytes that the zip directory states for it."""
    arrays: dict[str, _Array] = {}
    with _opened(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(_SUFFIX)
            if name in arrays:
                raise ValueError(f"array {shown(name)} is there twice")
            _refuse_packing(info)
            arrays[name] = _read_header(archive, info)
    return arrays


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Errors: CheckpointError for all that goes wrong inside. What zipfile and numpy raise over a damaged or
    foreign file is no closed list: errors of their own, and those of struct, tokenize and the decompressors.
    """
    try:
        with (
            open_regular(path) as file,
            BufferedReader(file) as buffered,
            zipfile.ZipFile(buffered) as archive,
        ):
            yield archive
    except CheckpointError:
        raise
    except Exception as error:
        raise _damaged(path, error) from None


def _refuse_packing(info: zipfile.ZipInfo) -> None:
    """An array takes the memory that the directory states, so that has to be one which the file can hold."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"array {shown(info.filename)} is packed by method {info.compress_type} of zip; numpy stores "
            "arrays as they are or deflates them"
        )
    factor = 1 if info.compress_type == zipfile.ZIP_STORED else _DEFLATE_AT_BEST
    if info.file_size > factor * info.compress_size:
        raise ValueError(
            f"array {shown(info.filename)}: {info.compress_size} bytes are there, which cannot be the "
            f"{info.file_size} that the directory states"
        )


def _read_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Array:
    with archive.open(info) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array {shown(info.filename)} has npy version {version}; 1.0 or 2.0 is needed")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"array {shown(info.filename)} holds pickled objects, which are never read")
        needed, got = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
    if needed != got or any(size < 0 for size in shape):
        raise ValueError(
            f"array {shown(info.filename)}: {dtype} {list(shape)} takes {needed} bytes, {got} are there"
        )
    return _Array(dtype, shape)


def _read_array(path: Path, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    with _opened(path) as archive:
        info = archive.getinfo(name + _SUFFIX)
        _refuse_packing(info)
        with archive.open(info) as file:
            array: np.ndarray[Any, np.dtype[Any]] = npy.read_array(file, allow_pickle=False)
            return array


def _damaged(path: Path, error: Exception) -> CheckpointError:
    what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(f"{path}: not a readable npz: {what[:300]}; fetch or write it again")
