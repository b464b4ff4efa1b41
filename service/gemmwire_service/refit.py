"""New weights into the storage of a served layer: whole or not at all, between two forwards.

A refit goes: read and check the new weight, quantize it -> prepare it beside the live one, for each backend
that runs the layer -> one forward of it, judged as at load -> exchange the two, as one job of the device. The
first three leave the live weight alone, and run while forwards do. The last is done or undone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .check import judge
from .checkpoint.base import LayerWeights
from .device_work import on_device
from .engine import Engine
from .errors import (
    BackendError,
    CheckpointError,
    DeviceFailed,
    DeviceLost,
    ServiceError,
    VersionConflict,
    WeightsRefused,
)
from .layer import Layer, LayerError, Measured
from .mxfp8.fidelity import Fidelity
from .shadow import Shadow

log = logging.getLogger("gemmwire.refit")

Read = Callable[[], LayerWeights]
Number = Callable[[], Awaitable[int]]  # a version, for a weight that has been tried and is about to be served


class Seconds(NamedTuple):
    """What each stage took: reading, checking and quantizing; preparing; the trial; the exchange, with the
    wait for the forwards before it."""

    read: float
    prepare: float
    trial: float
    exchange: float


@dataclass(frozen=True)
class Refitted:
    layer: str
    version: int
    previous: int
    source_dtype: str
    error: LayerError
    seconds: Seconds


@dataclass(frozen=True)
class Source:
    """A layer's new weight: `read` loads it, in a thread of its own; `name` says where it comes from."""

    layer: Layer
    read: Read
    name: str


@dataclass(frozen=True, eq=False)
class _Candidate:
    shadow: Shadow
    error: LayerError
    source_dtype: str
    fidelity: Fidelity | None
    seconds: Seconds


class Refit:
    """Refits of one engine, one at a time, so that one copy of one layer is all the memory they take."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.turn = asyncio.Lock()  # held by whatever replaces weights, or layers

    async def refit(
        self, source: Source, if_version: int | None = None, number: Number | None = None
    ) -> Refitted:
        """Replace a layer's weight; on any error the layer answers as before, in the same version.

        `number` gives the new weight its version, greater than the layer's; without, it is the next.
        Errors: NotReady, Draining, VersionConflict, WeightsRefused, DeviceFailed, DeviceLost; of `number`.
        """
        async with self.turn:
            self._engine.refuse_unless_ready()
            self._refuse_gone(source.layer)
            refuse_version(source.layer.name, source.layer.version, if_version)
            return await self._refit(source, number)

    async def refit_all(self, sources: Sequence[Source], if_version: int | None = None) -> list[Refitted]:
        """Replace the weights of layers, none of them unless all can be: each is read and prepared twice.

        Each layer changes as a whole between two forwards, the layers one after the other.
        Errors: as `refit`; those of the first reading leave every layer as it was.
        """
        async with self.turn:
            self._engine.refuse_unless_ready()
            for source in sources:
                self._refuse_gone(source.layer)
                refuse_version(source.layer.name, source.layer.version, if_version)
            for source in sources:
                await self._prepare(source)
            done: list[Refitted] = []
            for source in sources:
                try:
                    done.append(await self._refit(source))
                except (WeightsRefused, DeviceFailed) as error:
                    if not done:
                        raise
                    message = f"{len(done)} of {len(sources)} layers have new weights: {error}"
                    raise DeviceFailed(message) from error
            return done

    def _refuse_gone(self, layer: Layer) -> None:
        """Errors: VersionConflict where the layer was unloaded, or loaded again, before its turn came."""
        if self._engine.layers.get(layer.name) is not layer:
            raise VersionConflict(
                f"Layer {layer.name!r} was unloaded or loaded again while its new weight waited; look at "
                "what is served now, then ask again",
                got=layer.version,
            )

    async def _refit(self, source: Source, number: Number | None = None) -> Refitted:
        candidate = await self._prepare(source)
        layer, previous = source.layer, source.layer.version
        version = previous + 1 if number is None else await number()
        began = time.perf_counter()
        await on_device(self._engine, partial(_change, source, candidate, version))
        self._engine.traffic.refits += 1
        seconds = candidate.seconds._replace(exchange=time.perf_counter() - began)
        log.info(
            "layer %s: version %d, from %s, in %.3f s", layer.name, layer.version, source.name, sum(seconds)
        )
        return Refitted(layer.name, version, previous, candidate.source_dtype, candidate.error, seconds)

    async def _prepare(self, source: Source) -> _Candidate:
        """The new weight, ready to be exchanged. Nothing of the layer has changed when this raises."""
        try:
            return await self._try(source)
        except (CheckpointError, BackendError) as error:
            message = f"Layer {source.layer.name!r} keeps version {source.layer.version}: {error}"
            raise WeightsRefused(message, expected=error.expected, got=error.got) from error
        except ServiceError:
            raise
        except Exception as error:
            log.exception("layer %s: a new weight could not be prepared", source.layer.name)
            raise DeviceFailed(
                f"The new weight of layer {source.layer.name!r} could not be prepared "
                f"({type(error).__name__}); version {source.layer.version} is still served. The server's log "
                "has the details"
            ) from error

    async def _try(self, source: Source) -> _Candidate:
        layer = source.layer
        began = time.perf_counter()
        weights = await asyncio.to_thread(source.read)
        refuse_misfit(layer, weights)
        read = time.perf_counter()
        shadow = await asyncio.to_thread(Shadow.prepare, layer, weights)
        prepared = time.perf_counter()
        trials = await on_device(self._engine, shadow.try_out)
        judged = [await asyncio.to_thread(judge, layer, weights.weight, weights.probe, y) for y in trials]
        seconds = Seconds(read - began, prepared - read, time.perf_counter() - prepared, 0.0)
        return _Candidate(shadow, judged[0], weights.source_dtype, weights.fidelity, seconds)


def refuse_version(layer: str, version: int, if_version: int | None) -> None:
    """Errors: VersionConflict where the layer is in another version than the caller takes it to be."""
    if if_version is not None and if_version != version:
        raise VersionConflict(
            f"Layer {layer!r} is in version {version}, not {if_version}: its weight has been replaced "
            "since. Look at what is served now, then ask again with its version, or without one",
            expected=version,
            got=if_version,
        )


def refuse_misfit(layer: Layer, weights: LayerWeights) -> None:
    """Errors: WeightsRefused where the new weight has another shape, or a bias where the layer has none."""
    spec, weight = layer.spec, weights.weight
    bias = weight.bias is not None
    if (weight.n, weight.k, bias) == (spec.n, spec.k, spec.bias):
        return
    given, needed = _shown(weight.n, weight.k, bias), _shown(spec.n, spec.k, spec.bias)
    raise WeightsRefused(
        f"Layer {layer.name!r} is {needed}, and the new weight {given}: a weight is replaced in place, by "
        "one of the same shape, with a bias exactly where the layer has one (zeros are one); serve another "
        "shape as a layer of its own",
        expected=needed,
        got=given,
    )


def _shown(n: int, k: int, bias: bool) -> str:
    return f"[{n}, {k}] {'with' if bias else 'without'} a bias"


def _change(source: Source, candidate: _Candidate, version: int) -> None:
    """On the device thread: from here on the layer computes with the new weight; if this raises, as before.

    Errors: DeviceFailed; DeviceLost where the old weight could not be put back either.
    """
    layer = source.layer
    try:
        candidate.shadow.exchange()
    except DeviceLost:
        raise
    except Exception as error:
        raise DeviceFailed(
            f"The weight of layer {layer.name!r} could not be replaced ({type(error).__name__}); version "
            f"{layer.version} is still served, bit for bit. The server's log has the details"
        ) from error
    fidelity = candidate.fidelity
    layer.measured = Measured(version, fidelity) if fidelity is not None else None  # first: readers compare
    layer.version = version
    layer.error = candidate.error
    layer.source, layer.source_dtype = source.name, candidate.source_dtype
