"""Which files make one model: a folder, an index, and the ways in which they do not fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemmwire_service.checkpoint.shards import open_shards
from gemmwire_service.errors import CheckpointError
from safetensors_bytes import container

INDEX = "model.safetensors.index.json"


def shard(*names: str) -> bytes:
    return container({name: ("U8", [1], b"\0") for name in names})


def write(folder: Path, **files: bytes | dict[str, Any]) -> None:
    """Files by stem: bytes become <stem>.safetensors, an object <stem>.safetensors.index.json."""
    for stem, content in files.items():
        if isinstance(content, bytes):
            (folder / f"{stem}.safetensors").write_bytes(content)
        else:
            (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(content))


def index(**shards: str) -> dict[str, Any]:
    return {
        "metadata": {"total_size": 2},
        "weight_map": {name: f"{stem}.safetensors" for name, stem in shards.items()},
    }


def found(path: Path) -> dict[str, str]:
    """Tensor name -> name of the file that holds it."""
    return {name: file.path.name for name, file in open_shards(path).files.items()}


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    write(tmp_path, model=shard("a", "b"))
    assert found(tmp_path) == {"a": "model.safetensors", "b": "model.safetensors"}


def test_model_safetensors_goes_before_other_files_and_says_so(tmp_path: Path) -> None:
    """Guards: a second copy of the model, under the names of another library, served as more layers."""
    write(tmp_path, model=shard("a"), consolidated=shard("b"))

    assert found(tmp_path) == {"a": "model.safetensors"}
    assert open_shards(tmp_path).notes == (
        "model.safetensors holds the model; not read: consolidated.safetensors",
    )


def test_a_folder_with_several_files_and_no_index(tmp_path: Path) -> None:
    write(tmp_path, text=shard("a"), vision=shard("b"))
    assert found(tmp_path) == {"a": "text.safetensors", "b": "vision.safetensors"}


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Guards: whichever file comes last."""
    write(tmp_path, x=shard("a"), y=shard("a"))
    with pytest.raises(CheckpointError, match=r"tensor 'a' is in x\.safetensors and in y\.safetensors"):
        open_shards(tmp_path)


@pytest.mark.parametrize("name", [".", INDEX], ids=["by-folder", "by-file"])
def test_an_index_says_which_file_holds_a_tensor(name: str, tmp_path: Path) -> None:
    write(tmp_path, x=shard("a", "b"), y=shard("a", "c"), stray=shard("d"), model=index(a="y", b="x", c="y"))
    assert found(tmp_path / name) == {"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"}


def test_what_an_index_leaves_out_is_listed(tmp_path: Path) -> None:
    """Guards: a layer that is missing from the served model without a word."""
    write(tmp_path, x=shard("a", "b", "c"), y=shard("a"), stray=shard("d"), model=index(a="y", c="x"))

    assert open_shards(tmp_path).notes == (
        "the index names the shards of the model; not read: stray.safetensors",
    )
    assert {(skipped.name, skipped.reason) for skipped in open_shards(tmp_path).skipped} == {
        ("a", "is in x.safetensors but the index puts it elsewhere"),
        ("b", "is in x.safetensors but the index omits it"),
    }


def test_shards_may_be_links(tmp_path: Path) -> None:
    """Guards: a check against escape that refuses the model cache of the Hugging Face hub."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "0a1b").write_bytes(shard("a"))
    (snapshot / "x.safetensors").symlink_to("../blobs/0a1b")
    write(snapshot, model=index(a="x"))

    assert found(snapshot) == {"a": "x.safetensors"}


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "sub/../../out.safetensors",
        "/out.safetensors",
        "..\\out.safetensors",
        "C:out",
        "",
        "a\0b",
    ],
    ids=["parent", "parent-of-a-folder", "absolute", "backslash", "drive", "empty", "nul"],
)
def test_a_shard_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    """Guards: an index that makes the server read any file of its machine."""
    (tmp_path / "out.safetensors").write_bytes(shard("a"))
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder, model={"weight_map": {"a": name}})

    with pytest.raises(CheckpointError, match="is outside the folder of the index"):
        open_shards(folder)


@pytest.mark.parametrize(
    "name", ["gone.safetensors", "n" * 5000, "\ud800"], ids=["plain", "too-long", "surrogate"]
)
def test_a_missing_shard_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, model={"weight_map": {"a": name}})
    with pytest.raises(CheckpointError, match=rf"{INDEX}: shard '.*' is missing") as error:
        open_shards(tmp_path)
    str(error.value).encode()


def test_a_tensor_that_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    write(tmp_path, x=shard("a"), model=index(a="x", b="x"))
    with pytest.raises(
        CheckpointError, match=r"says that tensor 'b' is in x\.safetensors, and it is not there"
    ):
        open_shards(tmp_path)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    """Guards: a message about the folder that leaves 100 files to search."""
    write(tmp_path, x=shard("a"), y=shard("b")[:-1], model=index(a="x", b="y"))
    with pytest.raises(CheckpointError, match=r"y\.safetensors: tensor 'b'.* run past the end"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "not valid JSON", id="empty"),
        pytest.param("[]", "an object", id="list"),
        pytest.param("{}", "needs a weight_map", id="no-map"),
        pytest.param('{"weight_map": ["a"]}', "needs a weight_map", id="map-is-a-list"),
        pytest.param('{"weight_map": {"a": 1}}', "needs a weight_map", id="number"),
        pytest.param('{"weight_map": {"a": "x", "a": "y"}}', "key 'a' is given twice", id="duplicate"),
        pytest.param('{"weight_map": {"a": "model-1.bin"}}', "is a pickle", id="pickle"),
    ],
)
def test_a_wrong_index_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX) as error:
        open_shards(tmp_path)
    assert says in str(error.value)


def test_one_index_of_another_name_is_taken(tmp_path: Path) -> None:
    write(tmp_path, x=shard("a", "b"), diffusion=index(a="x"))
    assert found(tmp_path) == {"a": "x.safetensors"}


def test_two_indexes_of_other_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path, x=shard("a"), one=index(a="x"), two=index(a="x"))
    with pytest.raises(CheckpointError, match=r"several shard indexes \(one.*, two.*\); name the one"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        pytest.param([], "no .safetensors file in this folder; it holds nothing", id="empty"),
        pytest.param(["readme.txt"], "it holds readme.txt", id="other-files"),
        pytest.param(["config.json", "pytorch_model.bin"], "pytorch_model.bin, which is a pickle", id="bin"),
        pytest.param(["model.PT"], "model.PT, which is a pickle", id="pt"),
    ],
)
def test_a_folder_without_safetensors_is_refused(names: list[str], says: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as error:
        open_shards(tmp_path)
    assert says in str(error.value)
