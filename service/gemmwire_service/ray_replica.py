"""One engine on one device as a replica of Ray Serve: the same app as gemmwire-serve has, behind Ray's proxy.

A replica takes requests once its layers are loaded, is replaced once its device is lost, and answers what
waits before it goes: Ray asks `check_health` for the first two, and runs the app's lifespan for the third.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemmwire.wire import WireError

from .app import Service, create_app
from .endpoint import send_reply
from .engine import Engine
from .errors import ServiceError
from .infer import error_reply
from .logs import configure
from .settings import Settings
from .shared_refit import SharedRefit

Fields = list[tuple[bytes, bytes]]


class Asked(NamedTuple):
    """An HTTP request on its way between two replicas; the body is passed on as it came."""

    method: str
    path: str
    query: bytes
    headers: Fields
    body: bytes = b""


class Told(NamedTuple):
    """The answer to one."""

    status: int
    headers: Fields
    body: bytes


class Replica:
    """As the ingress of an application: Ray runs the app and its lifespan.

    `settings`: a dump of Settings, whole, so that no variable of a node makes two replicas differ.
    `several`: there may be other replicas with these layers.
    """

    def __init__(self, settings: dict[str, Any], several: bool) -> None:
        self._settings = Settings(**settings)
        self._loaded = asyncio.Event()
        configure(self._settings)
        self._front = Front(create_app(self._settings, lambda _: self._loaded.set()), several)

    def __serve_build_asgi_app__(self) -> Front:
        return self._front

    async def check_health(self) -> None:
        """The first time, returns once the layers are loaded.

        Errors: what loading or the device ended with; why the replica serves older weights than others.
        """
        await self._loaded.wait()
        failure = self._engine.failure or self._behind
        if failure is not None:
            raise _told(failure)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self._front.service.state.engine
        return engine

    @property
    def _behind(self) -> Exception | None:
        shared: SharedRefit | None = self._front.service.state.shared_refit
        return shared.failure if shared is not None else None


class PartReplica(Replica):
    """Behind an ingress of ours, as an application of Ray has one: asked by calls, it runs the app itself."""

    def __init__(self, settings: dict[str, Any], several: bool) -> None:
        super().__init__(settings, several)
        service = self._front.service
        self._life = service.router.lifespan_context(service)
        self._begun = asyncio.ensure_future(self._life.__aenter__())

    async def layers(self) -> list[str]:
        """Their names, once they are loaded."""
        await self._loaded.wait()
        return list(self._engine.layers)

    async def ask(self, asked: Asked) -> Told:
        """What the app answers."""
        return await ask(self._front, asked)

    async def check_health(self) -> None:
        await self._begun
        await super().check_health()

    async def __del__(self) -> None:
        """By which Ray ends a replica, once its requests are answered."""
        await self._life.__aexit__(None, None, None)


class Front:
    """What Ray's proxy is answered: bodies as bytes, for it takes no view of a buffer over.

    Of several replicas one does not answer for all.
    """

    def __init__(self, service: Service, several: bool) -> None:
        self.service = service
        self._refused = dict(OF_ONE) if several else {}
        if service.state.shared_refit is not None:
            self._refused.pop(REFIT, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_bytes(message: Message) -> None:
            body = message.get("body")
            await send(message if isinstance(body, (bytes, type(None))) else {**message, "body": bytes(body)})

        if scope["type"] == "http" and self._refused:
            called = f"{scope['method']} {path_of(scope)}"
            for pattern, error in self._refused.items():
                if pattern.fullmatch(called):
                    return await refuse(scope, send_bytes, error)
        return await self.service(scope, receive, send_bytes)


METRICS = re.compile("GET /metrics")
REFIT = re.compile("PUT /v2/repository/models/[^/]+/weights")
OF_ONE = {
    METRICS: WireError(
        "route_unknown",
        "Behind Ray Serve there are several replicas, of which one or another would answer /metrics, each "
        "with its own counters; scrape Ray's metrics, which name the replica",
        status=404,
    ),
    REFIT: WireError(
        "refit_unshared",
        "There are several replicas, and one of them would have the new weight; deploy the application with "
        "refit_dir=FOLDER, which all nodes see",
        expected="refit_dir",
    ),
}


def path_of(scope: Scope) -> str:
    """Without the prefix that the application stands under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def refuse(scope: Scope, send: Send, error: Exception) -> None:
    headers = dict(scope["headers"])
    await send_reply(send, error_reply(error, headers), headers)


async def ask(app: ASGIApp, asked: Asked) -> Told:
    """An HTTP request, answered by an ASGI app in this process."""
    coming: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
    sent: list[Message] = []
    answered = asyncio.Event()

    async def receive() -> Message:
        if not coming:
            await answered.wait()  # the one who asks does not leave before
            return {"type": "http.disconnect"}
        return coming.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(_scope(asked), receive, send)
    finally:
        answered.set()
    start, *parts = sent
    bodies = [part.get("body", b"") for part in parts]
    return Told(start["status"], list(start["headers"]), bodies[0] if len(bodies) == 1 else b"".join(bodies))


def _scope(asked: Asked) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": asked.query,
        "headers": asked.headers,
        "client": None,
        "server": None,
    }


def _told(failure: Exception) -> Exception:
    """In a form that Ray can carry to its controller, which does not know the classes of every library."""
    if isinstance(failure, ServiceError):
        return RuntimeError(str(failure))
    return RuntimeError(f"{type(failure).__name__}: {failure}")
