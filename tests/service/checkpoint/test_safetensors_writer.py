"""Files that are written tensor by tensor, read by the library that defines the container."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from gemmwire_service.checkpoint.safetensors_file import SafetensorsFile
from gemmwire_service.checkpoint.safetensors_header import DTYPE_BITS
from gemmwire_service.checkpoint.safetensors_writer import NewTensor, SafetensorsWriter
from gemmwire_service.errors import OutputError

MIXED = [
    NewTensor("z", "F32", (3,)),
    NewTensor("a", "U8", (5,)),
    NewTensor("nothing", "F32", (0, 3)),
    NewTensor("m", "BF16", (1, 1)),
    NewTensor("wide", "I64", (2,)),
    NewTensor("\u00fcmlaut", "F8_E4M3", (2, 2)),
]


def written(path: Path, tensors: list[NewTensor], metadata: dict[str, str] | None = None) -> dict[str, bytes]:
    """Each tensor with bytes of its own, written last to first and in two parts."""
    content = {
        each.name: bytes((7 * i + j) % 251 for j in range(each.nbytes)) for i, each in enumerate(tensors)
    }
    with SafetensorsWriter(path, tensors, metadata or {}) as writer:
        for name in reversed(content):
            writer.put(name, [content[name][:2], content[name][2:]])
    return content


def test_what_was_put_is_where_the_header_says(tmp_path: Path) -> None:
    content = written(tmp_path / "m.safetensors", MIXED, {"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.metadata == {"format": "pt"}
    assert {name: b"".join(file.chunks(name, 3)) for name in file.tensors} == content
    assert {name: (info.dtype, info.shape) for name, info in file.tensors.items()} == {
        each.name: (each.dtype, each.shape) for each in MIXED
    }
    with safe_open(tmp_path / "m.safetensors", "pt") as theirs:
        assert sorted(theirs.keys()) == sorted(content)


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    """Guards: a file that engines which map it read slowly, or not at all."""
    written(tmp_path / "m.safetensors", MIXED)
    raw = (tmp_path / "m.safetensors").read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    for info in SafetensorsFile(tmp_path / "m.safetensors").tensors.values():
        assert (data + info.start) % (DTYPE_BITS[info.dtype] // 8) == 0, info


@pytest.mark.parametrize("content", [b"", b"12345678901", b"1234567890123"], ids=len)
def test_another_number_of_bytes_is_refused(content: bytes, tmp_path: Path) -> None:
    """Guards: a tensor that ends in zeros, or in the next one."""
    with (
        pytest.raises(OutputError, match=rf"{len(content)} bytes were written of z, which takes 12"),
        SafetensorsWriter(tmp_path / "m.safetensors", [NewTensor("z", "F32", (3,))], {}) as writer,
    ):
        writer.put("z", [content])


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "m.safetensors", [], {})
    assert (tmp_path / "m.safetensors").read_text() == "mine"
