"""The sub-command: its arguments, its order of work, its exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.safetensors_file import SafetensorsFile
from gemmwire_service.checkpoint.safetensors_writer import SafetensorsWriter
from gemmwire_service.errors import CheckpointError
from gemmwire_service.progress import Progress, size
from gemmwire_service.terminated import terminated

from .declaration import DECLARATIONS, declare
from .folder import check_apart, check_replaceable, check_room, copy_beside, replacing
from .outline import EXCLUDED, Outline, Step, outline
from .shards import file_names, split, write_index

SHARD_BYTES = 5_000_000_000
_METADATA = {"format": "pt"}  # transformers refuses a file without
_SLACK = 64 << 20  # bytes for headers, tokenizer and the like


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 when DST is complete. Errors: CheckpointError, OutputError; DST is then as it was."""
    options = parser().parse_args(list(arguments))
    patterns = (*(() if options.no_default_excludes else EXCLUDED), *options.exclude)
    with terminated():
        made = quantize(
            options.source, options.folder, options.format, patterns, options.force, options.shard
        )
    print(f"{options.folder}: {made.layers} layers in MXFP8, {size(made.written_bytes)}, as {options.format}")
    print(f"serve it with: gemmwire-serve --model NAME={options.folder}", flush=True)
    return 0


def quantize(
    source: Path, folder: Path, form: str, patterns: Sequence[str], force: bool, shard_bytes: int
) -> Outline:
    """Writes `folder`. Memory: one layer as stored and as quantized, whatever the size of the model."""
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: is no folder; name the folder of the model, which holds its config.json too",
            expected="a folder",
        )
    folder = Path(os.path.abspath(folder))  # "." has no name, and a link is replaced and not followed
    check_apart(source, folder)
    check_replaceable(folder, force)
    checkpoint = SafetensorsCheckpoint(source, allow_unquantized=True)
    plan = outline(checkpoint, patterns)
    check_room(folder, plan.written_bytes + _SLACK)
    for note in plan.notes:
        print(f"gemmwire-serve quantize: {note}", file=sys.stderr)
    with replacing(folder, force) as made:
        copy_beside(source, made)
        _write(checkpoint, plan, made, shard_bytes)
        declare(source, made, form, plan.excluded)
    return plan


def _write(checkpoint: SafetensorsCheckpoint, plan: Outline, made: Path, shard_bytes: int) -> None:
    shards = split(plan.steps, shard_bytes)
    files = file_names(len(shards))
    with Progress("quantizing", plan.read_bytes, plan.layers) as progress:
        for file, steps in zip(files, shards, strict=True):
            tensors = [tensor for step in steps for tensor in step.tensors]
            with SafetensorsWriter(made / file, tensors, _METADATA) as shard:
                for step in steps:
                    _take(checkpoint, step, shard, progress)
    if len(shards) > 1:
        write_index(made, files, shards)


def _take(
    checkpoint: SafetensorsCheckpoint, step: Step, shard: SafetensorsWriter, progress: Progress
) -> None:
    if step.layer is None:
        (copy,) = step.tensors
        shard.put(copy.name, _counted(checkpoint.files[copy.name], copy.name, progress))
        return
    weight = checkpoint.quantized(step.layer)
    codes, scales = step.tensors
    shard.put(codes.name, [weight.codes.view(torch.uint8).numpy().reshape(-1).data])
    shard.put(scales.name, [weight.scales.contiguous().numpy().reshape(-1).data])
    progress.add(step.layer, step.nbytes, layers=1)


def _counted(file: SafetensorsFile, name: str, progress: Progress) -> Iterator[bytearray]:
    for chunk in file.chunks(name):
        yield chunk
        progress.add(name, len(chunk))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="gemmwire-serve quantize",
        description="Write the model in folder SRC to the new folder DST with its linear layers in MXFP8, in "
        "a format that vLLM and SGLang load too. Everything else is copied unchanged. DST appears when it is "
        "complete and not before.",
        allow_abbrev=False,
    )
    result.add_argument("source", type=Path, metavar="SRC", help="folder of a model in safetensors")
    result.add_argument("folder", type=Path, metavar="DST", help="folder to make")
    result.add_argument("--format", choices=tuple(DECLARATIONS), default="modelopt", help="default: modelopt")
    result.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules to leave as they are, such as '*.down_proj'; may be repeated",
    )
    result.add_argument(
        "--no-default-excludes",
        action="store_true",
        help=f"quantize these too, which are left as they are otherwise: {', '.join(EXCLUDED)}",
    )
    result.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint")
    result.add_argument(
        "--shard",
        type=_positive,
        default=SHARD_BYTES,
        metavar="BYTES",
        help=f"largest file of weights (default {SHARD_BYTES})",
    )
    return result


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes above 0")
    return int(text)
