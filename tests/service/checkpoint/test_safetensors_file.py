"""One file on disk, against the reference reader, and what may happen to it between opening and reading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemmwire_service.checkpoint.safetensors_file import TORCH_DTYPES, SafetensorsFile
from gemmwire_service.errors import CheckpointError
from safetensors_bytes import container


def as_bytes(tensor: Tensor) -> list[int]:
    flat: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
    return flat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [name for name in TORCH_DTYPES if name != "F8_E8M0"])
def test_every_bit_is_read_as_the_reference_reader_reads_it(dtype: str, path: Path) -> None:
    """Guards: a conversion where a reinterpretation is meant; NaN payloads, -0 and subnormals included."""
    patterns = torch.randint(0, 256, (5, 3 * 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    tensor = patterns.view(TORCH_DTYPES[dtype])
    save_file({"a.before": torch.ones(3), "t": tensor, "z.after": torch.ones(5, dtype=torch.int8)}, path)

    file, reference = SafetensorsFile(path), load_file(path)["t"]
    read = file.load("t")
    assert (read.dtype, read.shape) == (reference.dtype, reference.shape)
    assert as_bytes(read) == as_bytes(reference)
    assert file.tensors["t"].dtype == dtype


def test_e8m0_is_read_as_bytes(path: Path) -> None:
    """Guards: exponents taken for numbers, by a copy between dtypes: 2^20 would become 0."""
    path.write_bytes(container({"s": ("F8_E8M0", [2, 2], bytes([0, 97, 147, 254]))}))

    scales = SafetensorsFile(path).load("s")
    assert scales.dtype == torch.uint8
    assert scales.tolist() == [[0, 97], [147, 254]]


@pytest.mark.parametrize("shape", [[0, 3], [2, 0], [0]], ids=str)
def test_a_tensor_without_elements_is_read(shape: list[int], path: Path) -> None:
    """Guards: torch.frombuffer, which refuses an empty buffer."""
    path.write_bytes(container({"t": ("F32", shape, b"")}))
    assert list(SafetensorsFile(path).load("t").shape) == shape


def test_a_tensor_at_an_odd_byte_is_read(path: Path) -> None:
    """Guards: reading in place, at an address that the dtype does not allow."""
    path.write_bytes(container({"a": ("U8", [1], b"\7"), "t": ("F32", [1], b"\x00\x00\x80?")}))
    assert SafetensorsFile(path).load("t").tolist() == [1.0]


def test_a_tensor_read_is_a_copy(path: Path) -> None:
    """Guards: a weight that changes, or a process that dies, with the file under it."""
    path.write_bytes(container({"t": ("U8", [3], b"abc")}))
    file = SafetensorsFile(path)
    first = file.load("t")
    first.zero_()
    os.truncate(path, 0)

    assert first.tolist() == [0, 0, 0]
    assert path.read_bytes() == b""


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def rewrite(path: Path) -> None:
    """The same size, other bytes, a later time."""
    path.write_bytes(container({"t": ("U8", [3], b"xyz")}))
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    """Another file of the same size and time under the same name."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(container({"t": ("U8", [3], b"xyz")}))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [shrink, grow, rewrite, replace], ids=lambda change: change.__name__)
def test_a_file_that_changed_since_it_was_opened_is_refused(change: object, path: Path) -> None:
    """Guards: the old header over new bytes, which are numbers too."""
    path.write_bytes(container({"t": ("U8", [3], b"abc")}))
    file = SafetensorsFile(path)
    assert callable(change)
    change(path)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed since it was opened"):
        file.load("t")


def test_a_file_that_shrinks_while_it_is_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: zeros for the bytes that are no longer there. The check before the read has passed by then."""
    path.write_bytes(container({"t": ("U8", [3], b"abc")}))
    file = SafetensorsFile(path)
    monkeypatch.setattr(file, "_check_unchanged", lambda status: None)
    shrink(path)

    with pytest.raises(CheckpointError, match="ended 1 bytes early while it was read") as error:
        file.load("t")
    assert (error.value.expected, error.value.got) == (3, 2)


def test_a_file_that_vanished_is_refused(path: Path) -> None:
    path.write_bytes(container({"t": ("U8", [3], b"abc")}))
    file = SafetensorsFile(path)
    path.unlink()

    with pytest.raises(CheckpointError, match="no such file"):
        file.load("t")


def test_a_pipe_is_refused(path: Path) -> None:
    """Guards: a start that waits forever for somebody to write into a named pipe."""
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(path: Path) -> None:
    path.write_bytes(container({}))
    path.chmod(0)
    with pytest.raises(CheckpointError, match="cannot be opened: Permission denied"):
        SafetensorsFile(path)
