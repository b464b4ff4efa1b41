"""One engine on one device as a replica of Ray Serve: the same app as gemmwire-serve has, behind Ray's proxy.

A replica takes requests once its layers are loaded, is replaced once its device is lost, and answers what
waits before it goes: Ray asks `check_health` for the first two, and runs the app's lifespan for the third.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from .app import Service, create_app
from .engine import Engine
from .errors import DeviceFailed, ServiceError
from .logs import configure
from .settings import Settings
from .shared_refit import SharedRefit


class Replica:
    """`settings`: a dump of Settings, whole, so that no variable of a node makes two replicas differ."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = Settings(**settings)
        self._loaded = asyncio.Event()
        self._service: Service | None = None

    def __serve_build_asgi_app__(self) -> Front:
        configure(self._settings)
        self._service = create_app(self._settings, lambda _: self._loaded.set())
        return Front(self._service)

    async def check_health(self) -> None:
        """The first time, returns once the layers are loaded.

        Errors: what loading or the device ended with; why the replica serves older weights than others.
        """
        await self._loaded.wait()
        failure = self._engine.failure or self._behind
        if failure is not None:
            raise _told(failure)

    @property
    def _behind(self) -> Exception | None:
        shared: SharedRefit | None = self._service.state.shared_refit if self._service else None
        return shared.failure if shared is not None else None

    @property
    def _engine(self) -> Engine:
        if self._service is None:
            raise DeviceFailed("The replica has no app yet; Ray asks for one before anything else")
        engine: Engine = self._service.state.engine
        return engine


class Front:
    """What Ray's proxy is answered: bodies as bytes, for it takes no view of a buffer over."""

    def __init__(self, app: Service) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_bytes(message: Message) -> None:
            body = message.get("body")
            await send(message if isinstance(body, (bytes, type(None))) else {**message, "body": bytes(body)})

        await self._app(scope, receive, send_bytes)


def _told(failure: Exception) -> Exception:
    """In a form that Ray can carry to its controller, which does not know the classes of every library."""
    if isinstance(failure, ServiceError):
        return RuntimeError(str(failure))
    return RuntimeError(f"{type(failure).__name__}: {failure}")
