"""From a path to the format that reads it, or to a sentence that says why none does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gemmwire_service.checkpoint import FORMATS, Checkpoint, open_checkpoint
from gemmwire_service.checkpoint.glassllm import installed_weights
from gemmwire_service.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"m.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", [".", "model.safetensors"])
@pytest.mark.parametrize("kind", [Path, str])
def test_safetensors_by_folder_or_file(name: str, kind: type, folder: Path) -> None:
    checkpoint: Checkpoint = open_checkpoint(kind(folder / name))
    assert (checkpoint.format, checkpoint.names(), checkpoint.skipped) == ("safetensors", ("m",), ())


def test_glassllm_by_name_or_file() -> None:
    pytest.importorskip("glassllm", reason="glassllm is not installed: pip install 'gemmwire[demo]'")
    by_name, by_file = open_checkpoint("glassllm"), open_checkpoint(installed_weights("en"))
    assert by_name.format == by_file.format == "glassllm"
    assert by_name.names() == by_file.names()


def test_the_name_glassllm_goes_before_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the demo broken by the directory that it is started in. An absolute path reaches the folder."""
    (folder / "glassllm").mkdir()
    (folder / "model.safetensors").rename(folder / "glassllm" / "model.safetensors")
    monkeypatch.chdir(folder)

    assert open_checkpoint(Path("glassllm")).format == "glassllm"
    assert open_checkpoint(folder / "glassllm").format == "safetensors"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".bin"])
def test_a_folder_may_be_named_as_a_file_is(suffix: str, folder: Path) -> None:
    (folder / f"step{suffix}").mkdir()
    (folder / "model.safetensors").rename(folder / f"step{suffix}" / "model.safetensors")
    assert open_checkpoint(folder / f"step{suffix}").names() == ("m",)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("gone", "no such file or folder", id="missing"),
        pytest.param("gone.safetensors", "no such file", id="missing-safetensors"),
        pytest.param("gone.safetensors.index.json", "no such file", id="missing-index"),
        pytest.param("gone.npz", "no such file", id="missing-npz"),
        pytest.param("link.safetensors", "no such file", id="broken-link"),
        pytest.param("empty.safetensors", "is empty", id="empty"),
        pytest.param("text.safetensors", "this is not a safetensors file", id="text"),
        pytest.param("page.safetensors", "This is not a safetensors file", id="html"),
        pytest.param("empty.npz", "not a readable npz", id="empty-npz"),
        pytest.param("model.gguf", "not a checkpoint that can be opened; give glassllm, ", id="gguf"),
        pytest.param("model", "not a checkpoint that can be opened; give glassllm, ", id="no-suffix"),
        pytest.param("model.bin", "a .bin file, which is a pickle", id="bin"),
        pytest.param("model.PT", "a .PT file, which is a pickle", id="pt"),
    ],
)
def test_what_cannot_be_opened_is_refused(name: str, says: str, tmp_path: Path) -> None:
    """Guards: a traceback where a sentence would help."""
    content = {
        "text.safetensors": b"\x05" + bytes(7) + b"hello",
        "page.safetensors": b"<!doctype html><html></html>",
    }
    if name.startswith("link"):
        (tmp_path / name).symlink_to("nowhere")
    elif not name.startswith("gone"):
        (tmp_path / name).write_bytes(content.get(name, b""))

    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as error:
        open_checkpoint(tmp_path / name)
    assert says in str(error.value)


def test_a_pickle_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"safetensors\.torch\.save_file"):
        open_checkpoint(tmp_path / "model.bin")


def test_every_format_says_what_it_looks_like(tmp_path: Path) -> None:
    """Guards: a format added to the list and missing from the message that lists them."""
    (tmp_path / "model.onnx").touch()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "model.onnx")
    assert len({each.name for each in FORMATS}) == len(FORMATS) >= 2
    for each in FORMATS:
        assert each.looks_like in str(error.value)
