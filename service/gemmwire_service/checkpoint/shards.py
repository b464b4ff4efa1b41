"""The safetensors files that make one model: a file, a folder of files, or a shard index."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gemmwire_service.checkpoint.base import Skipped, listed, shown
from gemmwire_service.checkpoint.json_object import read_object
from gemmwire_service.checkpoint.safetensors_file import SafetensorsFile
from gemmwire_service.errors import CheckpointError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_WHOLE, _INDEX = "model" + SUFFIX, "model" + INDEX_SUFFIX  # the names that transformers writes
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Shards:
    """Every tensor of a model and the file that holds it."""

    path: Path  # as it was given
    folder: Path  # where a config.json would be
    files: dict[str, SafetensorsFile]  # by tensor name
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


def open_shards(path: Path) -> Shards:
    """Opens what `path` names. Raises CheckpointError."""
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path, path)
    return _merge(path, path.parent, [path])


def pickle_refusal(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {found}, which is a pickle: loading one can run code that it carries, so none is "
        "read. Convert it to safetensors once, with "
        "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')",
        expected=SUFFIX,
        got=found,
    )


def _open_folder(folder: Path) -> Shards:
    """`model.safetensors`, else the index, else every *.safetensors: the order that transformers looks in."""
    entries = _entries(folder)
    weights = [name for name in entries if name.endswith(SUFFIX)]
    indexes = [name for name in entries if name.endswith(INDEX_SUFFIX)]
    if _WHOLE in weights:
        notes = _unread(weights, (_WHOLE,), f"{_WHOLE} holds the model")
        return _merge(folder, folder, [folder / _WHOLE], notes)
    if len(indexes) > 1 and _INDEX not in indexes:
        raise CheckpointError(f"{folder}: several shard indexes ({listed(indexes)}); name the one to serve")
    if indexes:
        return _open_index(folder / (_INDEX if _INDEX in indexes else indexes[0]), folder, weights)
    if weights:
        return _merge(folder, folder, [folder / name for name in weights])
    pickles = [name for name in entries if name.lower().endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise pickle_refusal(folder, f"no {SUFFIX} file but {pickles[0]}")
    raise CheckpointError(
        f"{folder}: no {SUFFIX} file in this folder; it holds " + (listed(entries) or "nothing"),
        expected=f"{_WHOLE}, *{INDEX_SUFFIX} or *{SUFFIX}",
        got=entries[:10],
    )


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror or error}") from None


def _unread(weights: Iterable[str], read: Collection[str], why: str) -> tuple[str, ...]:
    """A note on the files of the folder that were left alone."""
    others = [name for name in weights if name not in read]
    return (f"{why}; not read: {listed(others)}",) if others else ()


def _merge(path: Path, folder: Path, paths: list[Path], notes: tuple[str, ...] = ()) -> Shards:
    files: dict[str, SafetensorsFile] = {}
    for each in paths:
        file = SafetensorsFile(each)
        for name in file.tensors:
            if name in files:
                raise CheckpointError(
                    f"{path}: tensor {shown(name)} is in {files[name].path.name} and in {each.name}; "
                    "name the one file to serve, or give an index that says which holds it"
                )
            files[name] = file
    return Shards(path, folder, files, notes=notes)


def _open_index(index: Path, path: Path, beside: Iterable[str] = ()) -> Shards:
    weight_map = _weight_map(index)
    opened = {shard: SafetensorsFile(_shard_path(index, shard)) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in opened[shard].tensors:
            raise CheckpointError(
                f"{index}: says that tensor {shown(name)} is in {shard}, and it is not there; "
                "index and shards are not of one model",
                expected=shard,
            )
    unlisted = (
        Skipped(
            name, f"is in {shard} but the index {'puts it elsewhere' if name in weight_map else 'omits it'}"
        )
        for shard, file in opened.items()
        for name in file.tensors
        if weight_map.get(name) != shard
    )
    notes = _unread(beside, opened, "the index names the shards of the model")
    files = {name: opened[shard] for name, shard in weight_map.items()}
    return Shards(path, index.parent, files, tuple(unlisted), notes)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map: Any = read_object(index, strict=True).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: needs a weight_map that maps tensor names to file names")
    return weight_map


def _shard_path(index: Path, shard: str) -> Path:
    """The shard beside the index. The check is on the name: files in a model cache are links to elsewhere."""
    parts = PurePosixPath(shard).parts
    if not parts or parts[0] == "/" or ".." in parts or any(char in shard for char in "\\\0:"):
        raise CheckpointError(
            f"{index}: shard {shown(shard)} is outside the folder of the index; shards lie beside it",
            expected="a file name",
            got=shard[:120],
        )
    if shard.lower().endswith(PICKLE_SUFFIXES):
        raise pickle_refusal(index, f"names the shard {shown(shard)}")
    path = index.parent.joinpath(*parts)
    if not os.path.exists(path):  # unlike Path.exists: False, not OSError, for a name too long to be one
        raise CheckpointError(
            f"{index}: shard {shown(shard)} is missing; fetch the model again, all of its files",
            expected=shard[:120],
            got="no such file",
        )
    return path
