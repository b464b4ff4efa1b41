"""Checkpoints that come and go while a server runs: load, unload and refit of whole models, by name.

A model is loaded beside what serves, a layer at a time, and forwards go on between two layers; only when all
of it is there do requests find it, all at once. What is unloaded or replaced is found no more, answers what
was asked of it, and is then let go of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from .device_work import on_device
from .engine import Engine
from .errors import (
    BackendError,
    CheckpointError,
    DeviceFailed,
    ModelRefused,
    ModelUnknown,
    ServiceError,
    SettingsError,
    WeightsRefused,
)
from .layer import Layer
from .loader import Loader, Model, progress_of
from .model_root import ModelRoot
from .refit import Refit, Refitted, Source
from .settings import ModelSource

log = logging.getLogger("gemmwire.repository")

T = TypeVar("T")


class Entry(NamedTuple):
    """A model for the index: READY, UNAVAILABLE, LOADING or UNLOADING, and how many layers answer."""

    name: str
    state: str
    reason: str
    layers: int


class Repository:
    """For the event loop. Changes come one after the other; `refit` is the engine's one."""

    def __init__(self, engine: Engine, loader: Loader, refit: Refit, root: ModelRoot | None) -> None:
        self._engine = engine
        self._loader = loader
        self._refit = refit
        self._root = root
        self._turn = asyncio.Lock()
        self._doing: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # of the last change of a model, where that is worth telling
        self._versions: dict[str, int] = {}  # the last of each layer that is gone: none names two weights

    @property
    def open(self) -> bool:
        """Whether models can be loaded at all."""
        return self._root is not None

    def layers(self, name: str) -> list[Layer]:
        """Those of a model that is served; none where it is not."""
        return [layer for layer in self._engine.layers.values() if name and layer.model == name]

    async def index(self) -> list[Entry]:
        """The models of the root and those that are served from elsewhere."""
        found = {} if self._root is None else await asyncio.to_thread(self._root.names)
        served = {layer.model for layer in self._engine.layers.values() if layer.model}
        return [self._entry(name, found.get(name)) for name in sorted({*found, *served})]

    def _entry(self, name: str, unfit: str | None) -> Entry:
        layers = len(self.layers(name))
        state = self._doing.get(name, "READY" if layers else "UNAVAILABLE")
        reason = self._reasons.get(name) or unfit or ("" if layers else "not loaded")
        return Entry(name, state, reason, layers)

    async def load(self, name: str) -> list[Layer]:
        """Load a model of the root, or load it again; on any error, what was there is served as before.

        Errors: NotReady, Draining, ModelUnknown, ModelRefused, DeviceFailed, DeviceLost.
        """
        folder = await self._find(name)
        async with self._changing(name, "LOADING"):
            try:
                new = await self._trying(name, self._make(ModelSource(name, folder)))
            except ServiceError as error:
                self._reasons[name] = str(error)
                raise
            async with self._refit.turn:
                old = self.layers(name)
                self._exchange(old, new)
            self._reasons.pop(name, None)
            await self._let_go(old)
        log.info("model %s: %d layers from %s", name, len(new), folder)
        return new

    async def unload(self, name: str) -> None:
        """No request finds the model from now on; returns once those before have been answered.

        Errors: NotReady, Draining, ModelUnknown, ModelRefused.
        """
        self._engine.refuse_unless_ready()
        self._refuse_unless_open()
        async with self._changing(name, "UNLOADING"):
            async with self._refit.turn:
                old = self._served(name)
                self._exchange(old, [])
            self._reasons[name] = "unloaded"
            await self._let_go(old)
        log.info("model %s: unloaded", name)

    async def refit(self, name: str, source: str, if_version: int | None) -> list[Refitted]:
        """Replace every weight of a served model by those of `source`, a model of the root.

        Nothing changes unless all of them have been read, checked and tried. Errors: as `load`, and
        VersionConflict, WeightsRefused.
        """
        folder = await self._find(source)
        async with self._turn:
            layers = self._served(name)
            # What a training run sends once would fill a cache.
            opening = asyncio.to_thread(self._loader.open, ModelSource(name, folder), keep=False)
            model = await self._trying(name, opening)
            return await self._refit.refit_all(_sources(name, model, layers), if_version)

    # --- steps ---

    async def _find(self, name: str) -> str:
        self._engine.refuse_unless_ready()
        root = self._refuse_unless_open()
        return str(await asyncio.to_thread(root.find, name))

    @asynccontextmanager
    async def _changing(self, name: str, what: str) -> AsyncIterator[None]:
        async with self._turn:
            self._engine.refuse_unless_ready()
            self._doing[name] = what
            try:
                yield
            finally:
                del self._doing[name]

    async def _trying(self, name: str, work: Awaitable[T]) -> T:
        kept = len(self.layers(name))
        still = f"; its {kept} layers are served as before" if kept else ""
        try:
            return await work
        except (CheckpointError, BackendError, SettingsError) as error:
            message = f"Model {name!r} could not be loaded{still}: {error}"
            raise ModelRefused(message, expected=error.expected, got=error.got) from error
        except ServiceError:
            raise
        except Exception as error:
            log.exception("model %s could not be loaded", name)
            raise DeviceFailed(
                f"Model {name!r} could not be loaded ({type(error).__name__}){still}. The server's log "
                "has the details"
            ) from error

    async def _make(self, source: ModelSource) -> list[Layer]:
        model = await asyncio.to_thread(self._loader.open, source)
        self._refuse_taken(model)
        layers: list[Layer] = []
        try:
            with progress_of(model) as progress:
                for name in model.checkpoint.names():
                    layers.append(await self._layer(model, name))
                    progress.add(layers[-1].name, model.checkpoint.nbytes(name), layers=1)
        except Exception:
            await self._let_go(layers)
            raise
        return layers

    async def _layer(self, model: Model, name: str) -> Layer:
        device = self._engine.device
        ready = await asyncio.to_thread(self._loader.ready, model, name, device.device)
        return await on_device(self._engine, partial(self._loader.serve_later, model, name, ready, device))

    def _exchange(self, old: Iterable[Layer], new: Iterable[Layer]) -> None:
        for layer in old:
            self._versions[layer.name] = layer.version
        for layer in new:
            layer.number(self._versions.get(layer.name, 0) + 1)
        self._engine.exchange(old, new)

    async def _let_go(self, layers: list[Layer]) -> None:
        """Once the requests before are answered; their memory is free when nobody holds them any more."""
        if layers:
            await on_device(self._engine, partial(_release, self._engine, layers))

    # --- refusals ---

    def _refuse_unless_open(self) -> ModelRoot:
        if self._root is None:
            raise ModelRefused(
                "This server loads and unloads nothing while it runs; start it with --model-root FOLDER",
                expected="--model-root",
            )
        return self._root

    def _served(self, name: str) -> list[Layer]:
        layers = self.layers(name)
        if not layers:
            raise ModelUnknown(
                f"No model {name[:120]!r} is served; POST /v2/repository/index lists those that are",
                got=name[:120],
            )
        return layers

    def _refuse_taken(self, model: Model) -> None:
        """Errors: ModelRefused where another model, or a layer of its own, has a name that this one needs."""
        for name in model.checkpoint.names():
            layer = self._engine.layers.get(model.layer(name))
            if layer is not None and layer.model != model.source.name:
                raise ModelRefused(
                    f"Model {model.source.name!r} would have a layer {layer.name!r}, and there is one from "
                    f"{layer.source}; rename the model's folder",
                    got=layer.name,
                )


def _release(engine: Engine, layers: Iterable[Layer]) -> None:
    for layer in layers:
        engine.device.release(layer)


def _sources(name: str, model: Model, layers: list[Layer]) -> list[Source]:
    """A new weight for each layer. Errors: WeightsRefused where the two do not have the same layers."""
    new = {model.layer(local): local for local in model.checkpoint.names()}
    served = {layer.name for layer in layers}
    if set(new) != served:
        missing, more = sorted(served - set(new)), sorted(set(new) - served)
        raise WeightsRefused(
            f"Model {name!r} keeps its weights: {model.source.path} has {len(new)} layers, not the "
            f"{len(served)} that are served; {len(missing)} are missing {missing[:3]}, {len(more)} are not "
            f"served {more[:3]}. Name a model with these very layers, or replace them one by one with "
            "PUT /v2/repository/models/{layer}/weights",
            expected=len(served),
            got=len(new),
        )
    read = model.checkpoint.read
    return [Source(layer, partial(read, new[layer.name]), model.source.path) for layer in layers]
