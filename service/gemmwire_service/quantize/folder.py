"""A folder that appears whole or not at all, and the files of a model that go with its weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemmwire_service.checkpoint.hf_config import CONFIG, MODELOPT_CONFIG
from gemmwire_service.checkpoint.shards import INDEX_SUFFIX, PICKLE_SUFFIXES, SUFFIX
from gemmwire_service.errors import OutputError

_OTHER_WEIGHTS = (
    *PICKLE_SUFFIXES,
    ".bin.index.json",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".npz",
)


@contextmanager
def replacing(folder: Path, force: bool) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its name when the block ends well and goes when it does not.

    An existing `folder` is replaced only if `force`, and only if it is empty or a checkpoint: it is renamed
    away first and removed last. Errors: OutputError, for what cannot be written too.
    """
    check_replaceable(folder, force)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror or error}") from None
    try:
        try:
            yield made
            check_replaceable(folder, force)  # another may have made it in the meantime
            _take_place(made, folder)
        except OSError as error:
            raise OutputError(
                f"{folder}: writing failed: {error.strerror or error}; nothing is left of it, and what was "
                "there before is as it was",
                got=error.strerror,
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_replaceable(folder: Path, force: bool) -> None:
    """Raises OutputError where `folder` is there and must not be replaced."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: is there and is no folder; name a folder to make")
    if folder.is_mount():
        raise OutputError(f"{folder}: is a mount point, whose place nothing can take; name a folder in it")
    names = [entry.name for entry in folder.iterdir()]
    if not names:
        return
    if not force:
        raise OutputError(f"{folder}: is there and not empty; --force replaces it, or name another folder")
    if not any(name == CONFIG or name.endswith(SUFFIX) for name in names):
        raise OutputError(
            f"{folder}: is no checkpoint (no {CONFIG}, no *{SUFFIX}) and is not replaced, even with --force; "
            "remove it yourself or name another folder"
        )


def check_apart(source: Path, folder: Path) -> None:
    """Raises OutputError where replacing `folder` would take `source` with it."""
    real, other = source.resolve(), folder.resolve()
    if real == other or other in real.parents:
        raise OutputError(
            f"{folder}: is the source {source}, or holds it; name a folder of its own", got=str(folder)
        )


def check_room(folder: Path, needed: int) -> None:
    """Raises OutputError where the disk has less than `needed` bytes free, before the first is written."""
    place = next(parent for parent in folder.resolve().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OutputError(
            f"{folder}: needs {needed} bytes, and {free} are free there; free some or name another disk",
            expected=needed,
            got=free,
        )


def copy_beside(source: Path, folder: Path) -> None:
    """Copies what lies beside the weights (tokenizer, generation config, licence, code): files that are no
    weights, and those of folders without weights. A module of sentence-transformers is such a folder and is
    copied with its weights. Nothing hidden, nothing deeper. OSError as it comes."""
    modules = _modules(source)
    for entry in _visible(source):
        if entry.is_file() and entry.name not in (CONFIG, MODELOPT_CONFIG) and not _is_weights(entry):
            shutil.copyfile(entry, folder / entry.name)
        elif entry.is_dir():
            files = [each for each in _visible(entry) if each.is_file()]
            if files and (entry.name in modules or not any(map(_is_weights, files))):
                (folder / entry.name).mkdir()
                for each in files:
                    shutil.copyfile(each, folder / entry.name / each.name)


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _is_weights(path: Path) -> bool:
    return path.name.lower().endswith((SUFFIX, INDEX_SUFFIX, *_OTHER_WEIGHTS))


def _modules(source: Path) -> set[str]:
    """The folders that modules.json of sentence-transformers names."""
    try:
        listed = json.loads((source / "modules.json").read_bytes())
        return {str(each["path"]) for each in listed}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def _take_place(made: Path, folder: Path) -> None:
    made.chmod(0o777 & ~_umask())  # mkdtemp's are its owner's alone
    if not folder.exists():
        made.rename(folder)
    else:
        away = Path(tempfile.mkdtemp(prefix=f".{folder.name}.replaced-", dir=folder.parent))
        try:
            folder.rename(away / folder.name)
            try:
                made.rename(folder)
            except OSError:
                (away / folder.name).rename(folder)
                raise
        finally:
            shutil.rmtree(away, ignore_errors=True)
    _sync(folder.parent)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
