"""The files of a model: how tensors are divided among them, their names, and their index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gemmwire_service.checkpoint.shards import INDEX_SUFFIX, SUFFIX

from .outline import Step


def split(steps: Sequence[Step], limit: int) -> list[list[Step]]:
    """Steps in their order, in files of at most `limit` bytes of tensors; a larger one has its own file."""
    files: list[list[Step]] = []
    room = 0
    for step in steps:
        needed = sum(tensor.nbytes for tensor in step.tensors)
        if not files or needed > room:
            files.append([])
            room = limit
        files[-1].append(step)
        room -= needed
    return files


def file_names(count: int) -> list[str]:
    """As transformers names them."""
    if count == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def write_index(folder: Path, files: Sequence[str], shards: Sequence[Sequence[Step]]) -> None:
    """The index of several shards. OSError as it comes."""
    tensors = {
        tensor.name: (file, tensor.nbytes)
        for file, steps in zip(files, shards, strict=True)
        for step in steps
        for tensor in step.tensors
    }
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in tensors.values())},
        "weight_map": {name: tensors[name][0] for name in sorted(tensors)},
    }
    (folder / f"model{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
