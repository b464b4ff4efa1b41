"""Refits that all servers of one checkpoint take, through the folder that they share.

A new weight goes: checked and tried by the server that received it -> the folder, under the next version ->
that server's own layer, then the answer. The others find it there within PERIOD_S and take it under the same
number. What fails before the folder has changed nothing anywhere; what fails after it is tried again until it
is done.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from .engine import Engine, State
from .errors import ServiceError
from .layer import Layer
from .refit import Refit, Refitted, Source, refuse_version
from .refit_folder import RefitFolder
from .safetensors_body import read_weights

log = logging.getLogger("gemmwire.refit")

PERIOD_S = 0.25
FAILURES = 3  # in a row, after which a server says that it cannot keep up
_RETRY_S = 2.0


class SharedRefit:
    """For the event loop. `refit` is the engine's one."""

    def __init__(self, engine: Engine, refit: Refit, folder: RefitFolder) -> None:
        self._engine = engine
        self._refit = refit
        self._folder = folder
        self._turn = asyncio.Lock()  # what this server publishes, it does not find there as another's
        self._failures = 0
        self.failure: Exception | None = None  # why this server is behind the others, and stays so

    async def publish(self, layer: Layer, body: memoryview, if_version: int | None) -> Refitted:
        """Errors: as `Refit.refit`, and DeviceFailed where the folder takes nothing."""
        async with self._turn:
            newest = max(layer.version, await asyncio.to_thread(self._folder.newest_of, layer.name))
            refuse_version(layer.name, newest, if_version)
            keep = partial(self._folder.publish, layer.name, body, layer.version, if_version)
            source = Source(layer, partial(read_weights, body, layer.spec), "a refit request")
            return await self._refit.refit(source, number=partial(asyncio.to_thread, keep))

    async def watch(self) -> None:
        """Take what others publish, until cancelled."""
        while True:
            await asyncio.sleep(_RETRY_S if self._failures else PERIOD_S)
            if self._engine.state is State.READY:
                await self._look()

    async def _look(self) -> None:
        errors = await self.catch_up()
        for error in errors:
            log.warning("a new weight that others serve could not be taken: %s", error)
        self._failures = self._failures + 1 if errors else 0
        self.failure = errors[0] if self._failures >= FAILURES else None

    async def catch_up(self) -> list[Exception]:
        """Every layer in its newest version. -> why some are not."""
        errors: list[Exception] = []
        async with self._turn:
            try:
                newest = await asyncio.to_thread(self._folder.newest, tuple(self._engine.layers))
            except OSError as error:
                return [error]
            for name, version in newest.items():
                layer = self._engine.layers.get(name)
                if layer is not None and layer.version < version:
                    try:
                        await self._take(layer, version)
                    except FileNotFoundError:
                        continue  # a newer one is there already
                    except (ServiceError, OSError) as error:
                        errors.append(error)
                    except Exception as error:  # no memory, say: it must not end the watch
                        log.exception("layer %s: version %d could not be taken", name, version)
                        errors.append(error)
        return errors

    async def _take(self, layer: Layer, version: int) -> None:
        weights = await asyncio.to_thread(self._folder.read, layer.spec, version)
        source = Source(layer, lambda: weights, str(self._folder.path))
        await self._refit.refit(source, number=partial(_known, version))


async def _known(version: int) -> int:
    return version
