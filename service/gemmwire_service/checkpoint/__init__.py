"""Checkpoints: from a path to the linear layers in it, one at a time.

    checkpoint = open_checkpoint(Path("model/"))
    for name in checkpoint.names():
        layer = checkpoint.read(name)      # LayerWeights: E4M3 codes, E8M0 scales, bias, probe

FORMATS is the list of what can be opened; a further format is one file and one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemmwire_service.checkpoint import glassllm, safetensors, shards
from gemmwire_service.checkpoint.base import Checkpoint, LayerShape, LayerWeights, Probe, Skipped
from gemmwire_service.errors import CheckpointError

__all__ = [
    "FORMATS",
    "Checkpoint",
    "Format",
    "LayerShape",
    "LayerWeights",
    "Probe",
    "Skipped",
    "open_checkpoint",
]


@dataclass(frozen=True)
class Format:
    """One way to store a checkpoint: what it looks like, in words and as a test of a path, and its class."""

    name: str
    looks_like: str
    accepts: Callable[[Path], bool]
    open: Callable[[Path, bool], Checkpoint]


FORMATS: tuple[Format, ...] = (
    # By name first: a folder that happens to be called glassllm is given as an absolute path.
    Format(
        "glassllm",
        "glassllm, glassllm:<language> or its .npz",
        lambda path: (
            glassllm.is_installed_name(path) or (path.suffix.lower() == ".npz" and not path.is_dir())
        ),
        lambda path, allow_unquantized: glassllm.GlassllmCheckpoint(path),
    ),
    Format(
        "safetensors",
        f"a {shards.SUFFIX} file, a *{shards.INDEX_SUFFIX} or a folder with them",
        lambda path: path.is_dir() or path.name.endswith((shards.SUFFIX, shards.INDEX_SUFFIX)),
        safetensors.SafetensorsCheckpoint,
    ),
)


def open_checkpoint(path: Path | str, *, allow_unquantized: bool = False) -> Checkpoint:
    """The checkpoint at `path`, in the first of FORMATS that accepts it. Raises CheckpointError.

    `allow_unquantized`: the weights that a quantized checkpoint leaves as floats are layers too, quantized as
    those of a float checkpoint; without it they are in `skipped`.
    Opening reads names and shapes and checks them all; weights are read, and their values checked, by `read`.
    """
    path = Path(path)
    try:
        path.exists()
    except OSError as error:
        raise CheckpointError(
            f"{str(path)[:200]}: no path that can be looked up ({error.strerror}); check --model",
            got=str(path)[:200],
        ) from None
    for each in FORMATS:
        if each.accepts(path):
            return each.open(path, allow_unquantized)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder; a path on this machine is needed, because nothing is fetched "
            "from a hub: download the model first",
            expected="a checkpoint",
            got="nothing",
        )
    if path.suffix.lower() in shards.PICKLE_SUFFIXES:
        raise shards.pickle_refusal(path, f"a {path.suffix} file")
    raise CheckpointError(
        f"{path}: not a checkpoint that can be opened; give "
        + "; or ".join(each.looks_like for each in FORMATS),
        expected=[each.looks_like for each in FORMATS],
        got=path.suffix or path.name,
    )
