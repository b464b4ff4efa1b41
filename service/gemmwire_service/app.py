"""create_app(settings): the control plane as FastAPI routes, infer as a bare ASGI endpoint."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gemmwire.wire import WireError

from . import __version__
from .access import Access
from .control import control_routes
from .docs import docs_routes
from .endpoint import InferEndpoint, send_reply
from .engine import Engine
from .errors import AccessRefused, EngineError
from .infer import Infer, Limits, error_reply
from .loading import make_engine
from .metrics import metrics_routes
from .model_root import ModelRoot
from .openapi import document_routes
from .refit import Refit
from .refit_folder import RefitFolder
from .repository import Repository
from .repository_routes import repository_routes
from .request_log import log_requests
from .settings import Settings
from .shared_refit import SharedRefit
from .shm import Regions
from .shm_openers import openers_of
from .shm_routes import shm_routes
from .status import status_routes
from .tracing import trace_requests
from .weights import weights_routes

INFER_PATHS = ("/v2/models/{layer}/infer", "/v2/models/{layer}/versions/{version}/infer")
_INFER = re.compile(r"/v2/models/(?P<layer>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")


class Service(FastAPI):
    """A FastAPI app that hands an infer request to its endpoint before FastAPI's own layers.

    Those cost as much as the rest of the request's Python together. The route is there as well, and taken
    where somebody added a middleware, which must not be passed by, or mounted the app under a prefix.
    Whatever the route, who may call it is decided first.
    """

    access: Access
    infer: Infer
    endpoint: InferEndpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            refusal = self.access.refuse(scope["method"], path, scope["query_string"], scope["headers"])
            if refusal is not None:
                return await self._turn_away(refusal, scope, send)
        if scope["type"] == "http" and scope["method"] == "POST" and not self.user_middleware:
            match = _INFER.fullmatch(scope["path"])
            if match is not None and not scope.get("root_path"):
                scope["path_params"] = {name: value for name, value in match.groupdict().items() if value}
                return await self.endpoint(scope, receive, send)
        return await super().__call__(scope, receive, send)

    async def _turn_away(self, refusal: AccessRefused, scope: Scope, send: Send) -> None:
        headers = dict(scope["headers"])
        reply = error_reply(refusal, headers)
        if _INFER.fullmatch(scope["path"]):
            now = time.monotonic_ns()
            self.infer.traffic.finished(None, reply.status, reply.reason, headers, now, None)
        else:
            self.infer.traffic.reject(reply.reason)
        await send_reply(send, reply, headers)


def create_app(settings: Settings, on_loaded: Callable[[Engine], None] | None = None) -> Service:
    """The service as an ASGI app. Its lifespan starts loading and returns: /v2/health/live answers at once.

    `on_loaded` hears, on the event loop, that loading has ended, well or not (`engine.failure`).
    """
    access = Access(settings.key_file)
    root = ModelRoot.of(settings.model_root) if settings.model_root else None
    folder = RefitFolder.of(settings.refit_dir) if settings.refit_dir else None
    engine, loader, device, ladder = make_engine(settings, on_loaded)
    openers = openers_of(settings, device)
    regions = Regions(tuple(opener.kind for opener in openers))
    refit = Refit(engine)
    shared = SharedRefit(engine, refit, folder) if folder is not None else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        watching = asyncio.create_task(shared.watch()) if shared is not None else None
        yield
        if watching is not None:
            watching.cancel()
        await engine.stop()
        await asyncio.to_thread(stop_tracing)
        regions.close()

    app = Service(
        title="gemmwire",
        version=__version__,
        description="MXFP8 linear layers, y = x @ W.T + b, over the Open Inference Protocol v2.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages run scripts of another site, as this one's
        redoc_url=None,
        # One would name http behind a proxy that ends TLS, where a client that follows shows its key.
        redirect_slashes=False,
    )
    app.state.engine = engine
    app.state.shared_refit = shared
    log_requests(engine.traffic, settings)
    stop_tracing = trace_requests(engine.traffic, settings.otlp_endpoint)
    app.access = access
    limits = Limits(settings.max_body_bytes, settings.max_json_bytes, settings.max_rows)
    app.infer = Infer(engine, limits, regions)
    app.endpoint = InferEndpoint(app.infer)
    for path in INFER_PATHS:
        app.router.routes.append(Route(path, app.endpoint, methods=["POST"], include_in_schema=False))
    repository = Repository(engine, loader, refit, root)
    app.include_router(control_routes(engine, repository, device, ladder.buckets, regions.offered))
    app.include_router(repository_routes(engine, repository))
    app.include_router(weights_routes(engine, refit, settings.max_weights_bytes, shared))
    app.include_router(metrics_routes(engine, device, settings))
    app.include_router(status_routes(engine, device, ladder.buckets, settings))
    app.include_router(shm_routes(regions, openers))
    app.include_router(docs_routes())
    _install_errors(app)
    document_routes(app, INFER_PATHS)
    return app


def _install_errors(app: FastAPI) -> None:
    """Every error of the control plane in the protocol's form."""

    @app.exception_handler(EngineError)
    @app.exception_handler(WireError)
    async def refused(request: Request, error: Exception) -> Response:
        return _problem(request, error)

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        details = error.errors() if isinstance(error, RequestValidationError | ValidationError) else []
        sentence = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in details)
        return _problem(request, WireError("request_invalid", f"The request is not valid: {sentence}"))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        code, sentence = {
            404: ("route_unknown", "There is no route {}; /docs lists them"),
            405: ("method_not_allowed", "{} is not a method of this route; /docs lists them"),
        }.get(status, ("http_error", "{} failed: " + str(getattr(error, "detail", ""))))
        what = sentence.format(f"{request.method} {request.url.path[:200]}")
        return _problem(request, WireError(code, what, status=status))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        return _problem(request, error)


def _problem(request: Request, error: Exception) -> Response:
    reply = error_reply(error, dict(request.headers.raw))
    request.app.state.engine.traffic.reject(reply.reason)
    return Response(b"".join(reply.buffers), status_code=reply.status, headers=reply.headers)
