"""From a checkpoint to served layers: open, choose a backend, prepare, check, one layer at a time."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .backends import select
from .backends.base import LayerSpec, Part, PreparedWeight
from .cache import cache_folder
from .check import check
from .checkpoint import Checkpoint, LayerWeights, open_checkpoint
from .checkpoint.base import listed
from .checkpoint.fused import FusedCheckpoint
from .checkpoint.safetensors import SafetensorsCheckpoint
from .checkpoint.spot_check import SpotChecked
from .checkpoint.weight_cache import CachedCheckpoint
from .device import Device
from .errors import SettingsError
from .layer import Layer, Measured
from .mxfp8.fake import keep_compiled_in
from .mxfp8.weight import MxWeight
from .partition import PartOfCheckpoint, Share
from .plans import Environment, PlanStore
from .progress import Progress
from .refit_folder import RefitFolder
from .routes import Router
from .settings import ModelSource, RandomLayer, Settings
from .shadow import aside
from .tuning import reason as one_line

log = logging.getLogger("gemmwire.loading")


class Loader:
    """Makes the layers of one server, at its start and later; it keeps what they share on their way."""

    def __init__(self, settings: Settings, choice: str) -> None:
        self._settings = settings
        self._choice = choice
        self._references = settings.references()
        self._rules = settings.fuse_rules()
        self._refits = RefitFolder.of(settings.refit_dir) if settings.refit_dir else None
        self._router: Router | None = None

    def load_all(self, device: Device) -> Iterator[Layer]:
        """On the device thread: each layer that the settings name, ready to serve.

        Errors: SettingsError, CheckpointError, BackendError.
        """
        names: set[str] = set()
        models: Iterable[Model] = map(self.open, self._settings.sources())
        randoms = self._settings.random_layers()
        if self._settings.part:
            models, randoms = _share_of(Share.of(self._settings.part), list(models), randoms)
        for model in models:
            yield from _unique(self._load_source(model, device), names)
        for random in randoms:
            spec = LayerSpec(random.name, random.n, random.k, bias=False)
            origin = ModelSource("", f"random {random.n}x{random.k}")
            layer = self._serve_newest(spec, partial(_random_weights, random), origin, device)
            yield from _unique([layer], names)
        self.finish(device)

    def open(self, source: ModelSource, *, keep: bool = True) -> Model:
        """Names and shapes, on any thread; `keep` what is quantized, if there is a cache for it.

        Errors: SettingsError, CheckpointError.
        """
        settings = self._settings
        opened = open_checkpoint(Path(source.path), allow_unquantized=settings.allow_unquantized)
        if keep and settings.weight_cache and isinstance(opened, SafetensorsCheckpoint):
            opened = CachedCheckpoint(opened, Path(settings.weight_cache).expanduser())
        reference = self._references.get(source.name)
        if reference is not None and source in settings.sources():  # it is of that model, and of no later one
            opened = SpotChecked(opened, SafetensorsCheckpoint(Path(reference)))
        model = Model(source, FusedCheckpoint(opened, self._rules) if self._rules else opened)
        _tell(source.path, model.checkpoint)
        return model

    def read(self, model: Model, name: str, device: torch.device) -> LayerWeights:
        """On any thread. Errors: CheckpointError; BackendError, before anything is read, where none can."""
        select(model.spec(name), device, self._choice)
        return model.checkpoint.read(name)

    def ready(self, model: Model, name: str, device: torch.device) -> Ready:
        """As much of a layer as can be made on any thread while forwards run. Errors: as `read`."""
        weights = self.read(model, name, device)
        try:
            with aside(device):
                backend = select(model.spec(name), device, self._choice).backend
                return Ready(weights, backend.prepare(weights.weight, device))
        except Exception as error:  # the device thread tries again, and then another backend
            log.warning("layer %s was not prepared aside: %s", model.layer(name), one_line(error))
            return Ready(weights, None)

    def serve_later(self, model: Model, name: str, ready: Ready, device: Device) -> Layer:
        """On the device thread, of a device that serves already. Errors: BackendError."""
        device.leave()  # tuning does not nest in serving
        try:
            router = self._router_of(device)
            return _serve(model.spec(name), ready.weights, model.source, router, device, ready.form)
        finally:
            self.finish(device)

    def finish(self, device: Device) -> None:
        """On the device thread: from here on it serves the layers made so far."""
        device.allocate()
        # One that serves several backends of a library is there once.
        for tuner in set(self._router_of(device).tuners.values()):
            device.enter(tuner.serving())

    def _load_source(self, model: Model, device: Device) -> Iterator[Layer]:
        with progress_of(model) as progress:
            for name in model.checkpoint.names():
                read = partial(self.read, model, name, device.device)
                layer = self._serve_newest(model.spec(name), read, model.source, device)
                progress.add(layer.name, model.checkpoint.nbytes(name), layers=1)
                yield layer

    def _serve_newest(
        self, spec: LayerSpec, read: Callable[[], LayerWeights], source: ModelSource, device: Device
    ) -> Layer:
        """Of the weight that other servers have been given since the checkpoint, if there is one."""
        newest = self._refits.read_newest(spec) if self._refits is not None else None
        version, weights = newest or (1, read())
        layer = _serve(spec, weights, source, self._router_of(device), device)
        if newest is not None:
            layer.number(version)
            layer.source = self._settings.refit_dir
            log.info("layer %s: version %d, from %s", layer.name, version, layer.source)
        return layer

    def _router_of(self, device: Device) -> Router:
        if self._router is None:
            cache = cache_folder(self._settings.cache_dir)
            keep_compiled_in(cache)
            store = PlanStore(cache, Environment.of(device.device))
            self._router = Router(device.device, device.ladder.buckets, self._choice, store, cache)
        return self._router


class Ready(NamedTuple):
    """A layer as it was read, and as its backend has prepared it, if that went well."""

    weights: LayerWeights
    form: PreparedWeight | None


@dataclass(frozen=True, eq=False)
class Model:
    """An open checkpoint and the name that its layers go by."""

    source: ModelSource
    checkpoint: Checkpoint

    def layer(self, name: str) -> str:
        return f"{self.source.name}.{name}" if self.source.name else name

    def spec(self, name: str) -> LayerSpec:
        n, k, bias = self.checkpoint.spec(name)
        return LayerSpec(self.layer(name), n, k, bias, _parts(self.checkpoint, name))


def _share_of(
    share: Share, models: list[Model], randoms: tuple[RandomLayer, ...]
) -> tuple[list[Model], tuple[RandomLayer, ...]]:
    """What of all layers is served here. Errors: SettingsError."""
    specs = [model.spec(name) for model in models for name in model.checkpoint.names()]
    sizes = {spec.name: spec.n * spec.k for spec in specs} | {each.name: each.n * each.k for each in randoms}
    chosen = share.of_all(sizes)
    here: list[Model] = []
    for model in models:
        names = {name for name in model.checkpoint.names() if model.layer(name) in chosen}
        here.append(Model(model.source, PartOfCheckpoint(model.checkpoint, names, share)))
    return here, tuple(each for each in randoms if each.name in chosen)


def _parts(checkpoint: Checkpoint, name: str) -> tuple[Part, ...]:
    parts: list[Part] = []
    if isinstance(checkpoint, FusedCheckpoint):
        for part, rows in checkpoint.parts(name):
            start = parts[-1].stop if parts else 0
            parts.append(Part(part, start, start + rows))
    return tuple(parts)


def progress_of(model: Model) -> Progress:
    names = model.checkpoint.names()
    nbytes = sum(model.checkpoint.nbytes(name) for name in names)
    return Progress(f"loading {model.source.path}", nbytes, len(names), write=log.info)


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


def _tell(path: str, checkpoint: Checkpoint) -> None:
    """Log what its reader should know of the checkpoint; one line for all that was skipped for one reason."""
    for note in checkpoint.notes:
        log.info("%s: %s", path, note)
    by_reason: dict[str, list[str]] = {}
    for skipped in checkpoint.skipped:
        by_reason.setdefault(skipped.reason, []).append(skipped.name)
    for reason, names in by_reason.items():
        log.info("%s: skipped %d (%s): %s", path, len(names), reason, listed(names))


def _serve(
    spec: LayerSpec,
    weights: LayerWeights,
    source: ModelSource,
    router: Router,
    device: Device,
    form: PreparedWeight | None = None,
) -> Layer:
    weight = weights.weight
    layer = Layer(
        spec, router.route(spec, weight, form), source.path, weights.source_dtype, model=source.name
    )
    if weights.fidelity is not None:
        layer.measured = Measured(layer.version, weights.fidelity)
    for each in layer.routes.fallbacks:
        log.warning(
            "layer %s, M=%d: %s failed (%s); another backend runs it",
            spec.name,
            each.bucket,
            each.backend,
            each.reason,
        )
    try:
        with router.serving(layer.routes):
            device.capture(layer)
            layer.error = check(layer, weight, weights.probe, device)
    except Exception:
        device.release(layer)
        raise
    return layer


def _random_weights(random: RandomLayer) -> LayerWeights:
    generator = torch.Generator().manual_seed(zlib.crc32(random.name.encode()))
    weight = torch.randn(random.n, random.k, generator=generator) / random.k**0.5
    return LayerWeights(random.name, MxWeight.from_float(weight), "F32", None)
