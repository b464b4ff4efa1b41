"""What reading the layers of a checkpoint costs: quantized at load, from the weight cache, stored in MXFP8.

    ./dev bench checkpoint [--layers 8] [--size 4096] [--threads 1]

BF16 layers are written to a temporary folder, so that the files are in memory. Each way is timed in turn,
ROUNDS times; the median is printed. Beside them: writing the model with gemmwire-serve quantize.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from gemmwire_service.checkpoint import Checkpoint
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.weight_cache import CachedCheckpoint
from gemmwire_service.quantize.command import main as quantize

ROUNDS = 7


def seconds(make: Callable[[], Checkpoint]) -> float:
    """To read every layer, one after the other. Opening is not counted: it reads headers alone."""
    checkpoint = make()
    began = time.perf_counter()
    for name in checkpoint.names():
        checkpoint.read(name)
    return time.perf_counter() - began


def ways(folder: Path) -> dict[str, Callable[[], Checkpoint]]:
    source, cache = folder / "source", folder / "cache"

    def cached() -> Checkpoint:
        return CachedCheckpoint(SafetensorsCheckpoint(source), cache)

    def touched() -> Checkpoint:
        shutil.rmtree(cache / "seen")
        return cached()

    seconds(cached)
    return {
        "read and quantize": lambda: SafetensorsCheckpoint(source),
        "weight cache": cached,
        "weight cache, file touched": touched,
        "MXFP8 checkpoint": lambda: SafetensorsCheckpoint(folder / "made"),
    }


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        weights = {
            f"layers.{i}.up.weight": torch.randn(options.size, options.size).bfloat16()
            for i in range(options.layers)
        }
        save_file(weights, folder / "source" / "model.safetensors")
        del weights
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            quantize([str(folder / "source"), str(folder / "made")])
        wrote = time.perf_counter() - began
        timed: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for way, make in ways(folder).items():
                timed.setdefault(way, []).append(seconds(make))
    print(
        f"{options.layers} layers of {options.size}x{options.size}, "
        f"{options.threads} of {os.cpu_count()} threads"
    )
    for way, rounds in timed.items():
        print(
            f"{way:28} {statistics.median(rounds):7.3f} s   (best {min(rounds):.3f}, worst {max(rounds):.3f})"
        )
    print(f"{'gemmwire-serve quantize':28} {wrote:7.3f} s   (once, synced to disk)")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(allow_abbrev=False)
    result.add_argument("--layers", type=int, default=8)
    result.add_argument("--size", type=int, default=4096)
    result.add_argument("--threads", type=int, default=1)
    return result


if __name__ == "__main__":
    main()
