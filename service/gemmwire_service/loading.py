"""From settings to served layers: open, choose a backend, prepare, check, one layer at a time."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .backends import AUTO, BACKENDS, select
from .backends.base import LayerSpec
from .buckets import Ladder
from .check import check
from .checkpoint import Checkpoint, LayerWeights, open_checkpoint
from .checkpoint.base import listed
from .checkpoint.safetensors import SafetensorsCheckpoint
from .checkpoint.spot_check import SpotChecked
from .device import Device
from .engine import Engine
from .errors import SettingsError
from .layer import Layer
from .mxfp8.weight import MxWeight
from .plans import Environment, PlanStore, cache_folder
from .progress import Progress
from .routes import Router
from .settings import ModelSource, RandomLayer, Settings

log = logging.getLogger("gemmwire.loading")

INVARIANT = "flashinfer_batch_invariant"
_FIXED_BUCKET = 128


def make_engine(settings: Settings, on_loaded: Callable[[Engine], None] | None) -> tuple[Engine, str, Ladder]:
    """-> (engine, device name, ladder). Errors: SettingsError."""
    device = choose_device(settings.device)
    ladder, choice = _ladder(settings, device)
    torch.set_num_threads(settings.cpu_threads or max(1, _cores() - 1))
    engine = Engine(
        lambda report: Device(device, ladder, report, graph_budget=settings.graph_budget_bytes),
        lambda owner: load_layers(settings, choice, owner),
        max_queue=settings.max_queue,
        max_queue_bytes=settings.max_queue_bytes,
        on_loaded=on_loaded,
    )
    return engine, str(device), ladder


def _ladder(settings: Settings, device: torch.device) -> tuple[Ladder, str]:
    """-> (ladder, choice of backends). Batch invariance is a backend's where one has it, else one fixed M."""
    if not settings.batch_invariant:
        return Ladder.up_to(settings.max_bucket), settings.backend
    if settings.backend in (AUTO, INVARIANT) and BACKENDS[INVARIANT]().unavailable(device) is None:
        return Ladder.up_to(settings.max_bucket), INVARIANT
    return Ladder((min(_FIXED_BUCKET, settings.max_bucket),)), settings.backend


def _cores() -> int:
    """Those this process may use. One is left to the event loop, which a matmul on all would stall."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one. Errors: SettingsError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(
            f"--device is {name}, but torch {torch.__version__} sees no CUDA device here; use --device cpu",
            expected="cpu",
            got=name,
        )
    return torch.device(name)


def load_layers(settings: Settings, choice: str, device: Device) -> Iterator[Layer]:
    """Each layer, ready to serve. Errors: SettingsError, CheckpointError, BackendError."""
    names: set[str] = set()
    cache = cache_folder(settings.cache_dir)
    store = PlanStore(cache, Environment.of(device.device))
    router = Router(device.device, device.ladder.buckets, choice, store, cache)
    references = settings.references()
    for source in settings.sources():
        checkpoint = open_checkpoint(Path(source.path), allow_unquantized=settings.allow_unquantized)
        if source.name in references:
            checkpoint = SpotChecked(checkpoint, SafetensorsCheckpoint(Path(references[source.name])))
        yield from _unique(_load_checkpoint(source, checkpoint, router, device), names)
    for random in settings.random_layers():
        origin = f"random {random.n}x{random.k}"
        yield from _unique([_serve(_random_weights(random), origin, router, device)], names)
    device.allocate()
    for tuner in set(router.tuners.values()):  # one that serves several backends of a library is there once
        device.enter(tuner.serving())


def _unique(layers: Iterator[Layer] | list[Layer], names: set[str]) -> Iterator[Layer]:
    for layer in layers:
        if layer.name in names:
            raise SettingsError(
                f"Two layers are named {layer.name!r}; give each checkpoint (--model NAME=PATH) "
                "and random layer its own name",
                got=layer.name,
            )
        names.add(layer.name)
        yield layer


def _load_checkpoint(
    source: ModelSource, checkpoint: Checkpoint, router: Router, device: Device
) -> Iterator[Layer]:
    _tell(source.path, checkpoint)
    names = checkpoint.names()
    nbytes = {name: checkpoint.nbytes(name) for name in names}
    with Progress(f"loading {source.path}", sum(nbytes.values()), len(names), write=log.info) as progress:
        for number, name in enumerate(names, 1):
            n, k, bias = checkpoint.spec(name)
            full = f"{source.name}.{name}" if source.name else name
            # refuse before the weight is read
            select(LayerSpec(full, n, k, bias), device.device, router.choice)
            log.debug("%s: layer %d of %d, %s [%d, %d]", source.path, number, len(names), name, n, k)
            layer = _serve(checkpoint.read(name), source.path, router, device, full)
            progress.add(full, nbytes[name], layers=1)
            yield layer


def _tell(path: str, checkpoint: Checkpoint) -> None:
    """Log what its reader should know of the checkpoint; one line for all that was skipped for one reason."""
    for note in checkpoint.notes:
        log.info("%s: %s", path, note)
    by_reason: dict[str, list[str]] = {}
    for skipped in checkpoint.skipped:
        by_reason.setdefault(skipped.reason, []).append(skipped.name)
    for reason, names in by_reason.items():
        log.info("%s: skipped %d (%s): %s", path, len(names), reason, listed(names))


def _serve(weights: LayerWeights, source: str, router: Router, device: Device, name: str = "") -> Layer:
    weight = weights.weight
    spec = LayerSpec(name or weights.name, weight.n, weight.k, weight.bias is not None)
    layer = Layer(spec, router.route(spec, weight), source, weights.source_dtype)
    for each in layer.routes.fallbacks:
        log.warning(
            "layer %s, M=%d: %s failed (%s); another backend runs it",
            spec.name,
            each.bucket,
            each.backend,
            each.reason,
        )
    with router.serving(layer.routes):
        device.capture(layer)
        layer.error = check(layer, weight, weights.probe, device)
    return layer


def _random_weights(random: RandomLayer) -> LayerWeights:
    generator = torch.Generator().manual_seed(zlib.crc32(random.name.encode()))
    weight = torch.randn(random.n, random.k, generator=generator) / random.k**0.5
    return LayerWeights(random.name, MxWeight.from_float(weight), "F32", None)
