"""Arrays in files that a terminal names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from gemmwire import InvalidArgument
from gemmwire.cli import files

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (4,)], ids=str)
def test_what_is_written_is_read(tmp_path: Path, suffix: str, dtype: str, shape: tuple[int, ...]) -> None:
    array = X.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(dtype)
    path = tmp_path / f"a{suffix}"
    files.write(path, "y", array)
    got = files.read(path, None)
    assert (got.dtype, got.shape) == (array.dtype, shape)
    assert np.array_equal(got, array)
    if suffix == ".safetensors":
        assert np.array_equal(load_file(path)["y"], array)


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    """Guards: twice the memory of a file of gigabytes."""
    np.save(tmp_path / "a.npy", np.zeros((1 << 10, 1 << 10), np.float32))
    assert isinstance(files.read(tmp_path / "a.npy", None), np.memmap)


def test_another_order_in_memory_is_written_right(tmp_path: Path) -> None:
    files.write(tmp_path / "a.safetensors", "y", np.asfortranarray(X)[:, ::-1])
    assert np.array_equal(load_file(tmp_path / "a.safetensors")["y"], X[:, ::-1])


def test_bfloat16_without_ml_dtypes_is_read_as_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a dependency that only some files need."""
    save_torch({"x": torch.tensor(X).bfloat16()}, tmp_path / "a.safetensors")
    np.save(tmp_path / "a.npy", X.astype(ml_dtypes.bfloat16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for name in ("a.safetensors", "a.npy"):
        got = files.read(tmp_path / name, None)
        assert got.dtype == np.float32
        assert np.array_equal(got, X)


def safetensors(entry: object, size: int = 48) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]} | changes


BROKEN = {
    "empty": (b"", "does not begin"),
    "no-json": (b"\x08" + bytes(7) + b"not json", "does not begin"),
    "long-header": ((1 << 40).to_bytes(8, "little") + b"{}", "does not begin"),
    "list": (b"\x02" + bytes(7) + b"[]", "does not begin"),
    "no-offsets": (safetensors({"dtype": "F32", "shape": [1]}), "cannot be read"),
    "number": (safetensors(5), "cannot be read"),
    "integers": (safetensors(entry(dtype="I64")), "is I64"),
    "beyond": (safetensors(entry(), 40), "does not fit"),
    "other-shape": (safetensors(entry(shape=[3, 5])), "does not fit"),
    "negative": (safetensors(entry(data_offsets=[-48, 0])), "does not fit"),
    "dtype-list": (safetensors(entry(dtype=["F32"])), "can be sent"),
    "offset-text": (safetensors(entry(data_offsets=["a", 48])), "cannot be read"),
    "shape-negative": (safetensors(entry(shape=[-3, -4])), "does not fit"),
    "shape-huge": (safetensors(entry(shape=[10**30])), "does not fit"),
    "shape-infinite": (safetensors({**entry(), "shape": [float("inf")]}), "cannot be read"),
    "shape-wraps": (safetensors(entry(shape=[1 << 40, 1 << 40], data_offsets=[0, 0])), "does not fit"),
    "backwards": (safetensors(entry(data_offsets=[48, 0])), "does not fit"),
}


@pytest.mark.parametrize(("data", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_safetensors_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    """Guards: a map of memory that is not the file's."""
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(InvalidArgument, match=words):
        files.read(tmp_path / "a.safetensors", None)


def test_one_of_several_tensors_has_to_be_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": X, "b": X + 1}, path)
    with pytest.raises(InvalidArgument, match="it holds a, b; say which with --tensor"):
        files.read(path, None)
    with pytest.raises(InvalidArgument, match="there is no tensor 'c'; it holds a, b"):
        files.read(path, "c")
    assert np.array_equal(files.read(path, "b"), X + 1)


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


NO_NPY = {
    "empty": b"",
    "junk": b"junk",
    "cut": b"\x93NUMPY\x01\x00",
    "header-that-no-tokenizer-ends": npy(b"{'descr': ("),
    "keys-of-two-kinds": npy(b"{1: 2, 'a': 3}"),
    "larger-than-its-file": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}"),
}


@pytest.mark.parametrize("data", NO_NPY.values(), ids=NO_NPY.keys())
def test_a_broken_npy_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"it is no .npy of numbers"):
        files.read(tmp_path / "a.npy", None)


def test_what_is_no_npy_at_all_gets_no_advice_about_pickles(tmp_path: Path) -> None:
    """Guards: NumPy's hint to load the file unsafely."""
    (tmp_path / "a.npy").write_bytes(b"hello")
    with pytest.raises(InvalidArgument, match=r"does not begin as one does; numpy\.save writes one"):
        files.read(tmp_path / "a.npy", None)


def test_objects_in_a_npy_are_refused(tmp_path: Path) -> None:
    """Guards: a file that runs code."""
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidArgument, match=r"no .npy of numbers"):
        files.read(tmp_path / "a.npy", None)


def test_several_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X)
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(InvalidArgument, match="several arrays"):
        files.read(tmp_path / "a.npy", None)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"has to end with .npy or .safetensors"):
        files.read(tmp_path / "a.pt", None)


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    """Guards: half a file that looks like the whole."""
    with pytest.raises(ValueError, match="allow_pickle"):
        files.write(tmp_path / "a.npy", "y", np.array([object()]))
    assert list(tmp_path.iterdir()) == []
