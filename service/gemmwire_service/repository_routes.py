"""The repository extension of the protocol: index, load, unload; and the refit of a whole model."""

from __future__ import annotations

from fastapi import APIRouter, Request

from gemmwire.wire import WireError

from .engine import Engine
from .forms import read_form
from .layer import Layer
from .openapi import problems, takes
from .protocol import (
    CheckpointIndexEntry,
    LoadResult,
    ModelIndexEntry,
    ModelRefitResult,
    RepositoryIndexRequest,
    RepositoryRequest,
)
from .repository import Entry, Repository
from .weights import answer, if_match

SOURCE = "from"
_IGNORED = frozenset({"unload_dependents"})
_PROBLEMS = problems(400, 404, 409, 413, 500, 503)
_TAKES = takes(RepositoryRequest)


def repository_routes(engine: Engine, repository: Repository) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v2/repository/index", responses=problems(400, 413), openapi_extra=takes(RepositoryIndexRequest)
    )
    async def index(request: Request) -> list[ModelIndexEntry | CheckpointIndexEntry]:
        form = await read_form(request, RepositoryIndexRequest)
        entries: list[ModelIndexEntry | CheckpointIndexEntry]
        entries = [_layer(layer) for layer in engine.layers.values()]
        if repository.open:
            entries += [_model(entry) for entry in await repository.index()]
        return [entry for entry in entries if entry.state == "READY" or not form.ready]

    @routes.post("/v2/repository/models/{model}/load", responses=_PROBLEMS, openapi_extra=_TAKES)
    async def load(model: str, request: Request) -> LoadResult:
        _refuse_parameters(await read_form(request, RepositoryRequest), known=_IGNORED)
        return LoadResult(name=model, layers=[layer.name for layer in await repository.load(model)])

    @routes.post("/v2/repository/models/{model}/unload", responses=_PROBLEMS, openapi_extra=_TAKES)
    async def unload(model: str, request: Request) -> LoadResult:
        _refuse_parameters(await read_form(request, RepositoryRequest), known=_IGNORED)
        await repository.unload(model)
        return LoadResult(name=model, layers=[])

    @routes.post(
        "/v2/repository/models/{model}/refit",
        summary="Replace every weight of a model in place, by those of a folder of the model root",
        responses=_PROBLEMS,
        openapi_extra=_TAKES,
    )
    async def refit(model: str, request: Request) -> ModelRefitResult:
        form = await read_form(request, RepositoryRequest)
        _refuse_parameters(form, known=frozenset({SOURCE}))
        source = form.parameters.get(SOURCE, model)
        if not isinstance(source, str):
            raise WireError("request_invalid", f"Parameter {SOURCE!r} is no string; name a model of the root")
        done = await repository.refit(model, source, if_match(request.headers.get("if-match")))
        return ModelRefitResult(name=model, source=source, layers=[answer(each) for each in done])

    return routes


def _refuse_parameters(form: RepositoryRequest, known: frozenset[str]) -> None:
    for name in form.parameters:
        if name not in known:
            raise WireError(
                "request_invalid",
                f"Parameter {name[:80]!r} is not offered: a model is what its folder holds, neither "
                "configured nor sent with the request",
                expected=sorted(known),
                got=name[:80],
            )


def _layer(layer: Layer) -> ModelIndexEntry:
    return ModelIndexEntry(
        name=layer.name,
        version=str(layer.version),
        state="READY",
        reason="",
        n=layer.spec.n,
        k=layer.spec.k,
        bias=layer.spec.bias,
        backend=layer.backend.name,
    )


def _model(entry: Entry) -> CheckpointIndexEntry:
    return CheckpointIndexEntry(**entry._asdict())
