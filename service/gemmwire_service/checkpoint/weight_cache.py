"""Quantized layers kept on disk, so that the next start of a server need not quantize them.

    <folder>/seen/<hash of where the tensors are>          the hash of their content, as it was then
    <folder>/weights/<hash of content, name, versions>.safetensors

A layer is found by the content of its tensors. That is hashed once for a file: as long as device, inode, size
and time of change are the same, which is also how a change under a running server is noticed, the hash noted
in `seen` is taken. Both folders are their owner's alone, or are not used. Nothing here stops a server: what
cannot be read or written is said and done without.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from gemmwire_service import __version__
from gemmwire_service.checkpoint.base import LayerShape, LayerWeights, Probe
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.safetensors_file import TORCH_DTYPES, SafetensorsFile
from gemmwire_service.checkpoint.safetensors_writer import NewTensor, SafetensorsWriter
from gemmwire_service.checkpoint.wrapped import WrappedCheckpoint
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.fidelity import Fidelity
from gemmwire_service.mxfp8.weight import MxWeight

log = logging.getLogger("gemmwire.weight_cache")

FORMAT = 2  # of what is kept; raise it when that, or a byte that the quantizer makes, changes
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "F8_E8M0"}
_ABANDONED_S = 24 * 3600.0  # no layer takes so long to write
WEIGHTS, SEEN = "weights", "seen"
CODES, SCALES, BIAS, PROBE_X, PROBE_Y = "codes", "scales", "bias", "probe.x", "probe.y"
LAYER, FIDELITY = "layer", "fidelity"  # of its metadata


class CachedCheckpoint(WrappedCheckpoint):
    """A `Checkpoint` that quantizes a float layer once and takes it from `folder` from then on.

    Layers that are MXFP8 as stored are read from where they are.
    """

    def __init__(self, checkpoint: SafetensorsCheckpoint, folder: Path) -> None:
        super().__init__(checkpoint)
        self._checkpoint, self._folder = checkpoint, folder
        self._ours = _is_ours(folder / WEIGHTS) and _is_ours(folder / SEEN)
        if self._ours:
            _sweep(folder / WEIGHTS)
        self.hits = 0

    def read(self, name: str) -> LayerWeights:
        self.spec(name)  # raises for an unknown one
        linear = self._checkpoint.linears[name]
        if linear.scale is not None or not self._ours:
            return self._checkpoint.read(name)
        path = self._folder / WEIGHTS / f"{self._key(name)}.safetensors"
        kept = _load(path, name, self.spec(name), linear.weight.dtype) if path.exists() else None
        if kept is not None:
            self.hits += 1
            return kept
        weights = self._checkpoint.read(name)
        _keep(path, weights)
        return weights

    def _key(self, name: str) -> str:
        """The layer's name is part of it because the rows of its probe follow from the name."""
        return sha256(f"{FORMAT}:{__version__}:{self._content(name)}:{name}".encode()).hexdigest()

    def _content(self, name: str) -> str:
        """The hash of the content, as noted for these very files, or computed and noted."""
        note = self._folder / SEEN / sha256(self._place(name).encode()).hexdigest()
        try:
            noted = note.read_text("ascii")
            if len(noted) == sha256().digest_size * 2:
                return noted
        except (OSError, ValueError):
            pass
        content = self._hash(name)
        _write(note, content)
        return content

    def _place(self, name: str) -> str:
        linear, files = self._checkpoint.linears[name], self._checkpoint.files
        parts = [
            (os.path.realpath(files[part.name].path), files[part.name].identity, part.start, str(part))
            for part in linear.parts()
        ]
        return json.dumps([FORMAT, linear.transposed, parts])

    def _hash(self, name: str) -> str:
        linear, files = self._checkpoint.linears[name], self._checkpoint.files
        digest = sha256(f"{linear.transposed}".encode())
        for part in linear.parts():
            digest.update(f":{part}:".encode())
            for chunk in files[part.name].chunks(part.name):
                digest.update(chunk)
        return digest.hexdigest()


def _load(path: Path, name: str, spec: LayerShape, source_dtype: str) -> LayerWeights | None:
    """What is kept, or None where it is not what was kept: it will be written again."""
    try:
        file = SafetensorsFile(path)
        tensors = {each: file.load(each) for each in file.tensors}
        weight = MxWeight.from_mxfp8(tensors[CODES], tensors[SCALES], tensors.get(BIAS))
        probe = Probe(tensors[PROBE_X], tensors[PROBE_Y])
        fidelity = Fidelity(**json.loads(file.metadata[FIDELITY]))
        if (weight.n, weight.k, weight.bias is not None) != spec:
            raise CheckpointError(f"{path}: is of another layer: {weight.n}x{weight.k}")
    except (CheckpointError, KeyError, ValueError, TypeError) as error:
        log.warning("%s cannot be used and is made again: %s", path, error)
        return None
    return LayerWeights(name, weight, source_dtype, probe, fidelity)


def _keep(path: Path, weights: LayerWeights) -> None:
    weight, probe, fidelity = weights.weight, weights.probe, weights.fidelity
    if probe is None or fidelity is None:
        return
    tensors: dict[str, Tensor | None] = {
        CODES: weight.codes[:, : weight.k],
        SCALES: weight.scales,
        BIAS: weight.bias,
        PROBE_X: probe.x,
        PROBE_Y: probe.y,
    }
    there = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    new = [NewTensor(name, _DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in there.items()]
    metadata = {LAYER: weights.name, FIDELITY: json.dumps(asdict(fidelity))}
    beside = _beside(path)
    try:
        _make(path.parent)
        with SafetensorsWriter(beside, new, metadata) as writer:
            for name, tensor in there.items():
                writer.put(name, [_bytes(tensor)])
        beside.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s); it will be quantized again", path, error.strerror or error)
        _remove(beside)


def _write(path: Path, text: str) -> None:
    beside = _beside(path)
    try:
        _make(path.parent)
        beside.write_text(text, "ascii")
        beside.replace(path)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror or error)
        _remove(beside)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is such as `_make` makes it, or is not there yet."""
    try:
        status = folder.lstat()
    except OSError:
        return True
    own = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
    if not (own and stat.S_ISDIR(status.st_mode)):
        log.warning(
            "%s is not used: others can write to it, and what they put there would be served; remove it",
            folder,
        )
        return False
    return True


def _make(folder: Path) -> None:
    """Weights that others could exchange would be served: the folder is its owner's alone."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _sweep(folder: Path) -> None:
    """Remove what a process that was killed as it wrote has left, which may be as large as a layer."""
    try:
        for part in folder.glob(".*"):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                _remove(part)
    except OSError as error:
        log.debug("%s cannot be looked through: %s", folder, error)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        log.debug("%s is left behind", path)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
