"""The control plane: everything of the protocol but infer, as FastAPI routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from . import __version__
from .engine import Engine, State
from .infer import find_layer
from .inputs import INPUT
from .layer import Layer
from .mxfp8.fidelity import Fidelity
from .openapi import problems
from .outputs import OUTPUT
from .protocol import (
    BucketPlan,
    EagerBucket,
    Fallback,
    FusedPart,
    ModelConfig,
    ModelMetadata,
    ModelStatistics,
    PassedOver,
    ServerMetadata,
    TensorMetadata,
    WeightFidelity,
)
from .repository import Repository
from .routes import Route

EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]
PLATFORM = "gemmwire_mxfp8"
_UNKNOWN = problems(404, 503)
_UNWELL: dict[int | str, dict[str, Any]] = {503: {"description": "not, or not yet"}}


def control_routes(
    engine: Engine,
    repository: Repository,
    device: str,
    buckets: tuple[int, ...],
    shared: tuple[str, ...] = (),
) -> APIRouter:
    routes = APIRouter()
    extensions = [*EXTENSIONS, "model_repository"] if repository.open else list(EXTENSIONS)
    extensions += [f"{kind}_shared_memory" for kind in shared]

    @routes.get("/v2")
    async def server_metadata() -> ServerMetadata:
        return ServerMetadata(name="gemmwire", version=__version__, extensions=extensions)

    @routes.head("/v2/health/live", include_in_schema=False)
    @routes.get("/v2/health/live", response_class=Response, responses=_UNWELL)
    async def live() -> Response:
        return Response(status_code=503 if engine.state is State.FAILED else 200)

    @routes.head("/v2/health/ready", include_in_schema=False)
    @routes.get("/v2/health/ready", response_class=Response, responses=_UNWELL)
    async def ready() -> Response:
        return Response(status_code=200 if engine.state is State.READY else 503)

    @routes.get("/v2/models/stats")
    async def all_statistics() -> ModelStatistics:
        layers = engine.layers.values()
        return ModelStatistics(
            model_stats=[layer.stats.document(layer.name, layer.version) for layer in layers]
        )

    @routes.get("/v2/models/{layer}", responses=_UNKNOWN)
    @routes.get("/v2/models/{layer}/versions/{version}", responses=_UNKNOWN)
    async def metadata(layer: str, version: str | None = None) -> ModelMetadata:
        return _metadata(find_layer(engine, layer, version))

    @routes.get("/v2/models/{layer}/ready", response_class=Response, responses=_UNKNOWN)
    @routes.get("/v2/models/{layer}/versions/{version}/ready", response_class=Response, responses=_UNKNOWN)
    async def model_ready(layer: str, version: str | None = None) -> Response:
        if version is not None or not repository.layers(layer):
            find_layer(engine, layer, version)
        return Response(status_code=200 if engine.state is State.READY else 503)

    @routes.get("/v2/models/{layer}/config", responses=_UNKNOWN)
    @routes.get("/v2/models/{layer}/versions/{version}/config", responses=_UNKNOWN)
    async def config(layer: str, version: str | None = None) -> ModelConfig:
        return _config(find_layer(engine, layer, version), device, buckets)

    @routes.get("/v2/models/{layer}/stats", responses=_UNKNOWN)
    @routes.get("/v2/models/{layer}/versions/{version}/stats", responses=_UNKNOWN)
    async def statistics(layer: str, version: str | None = None) -> ModelStatistics:
        found = find_layer(engine, layer, version)
        return ModelStatistics(model_stats=[found.stats.document(found.name, found.version)])

    return routes


def _metadata(layer: Layer) -> ModelMetadata:
    return ModelMetadata(
        name=layer.name,
        versions=[str(layer.version)],
        platform=PLATFORM,
        inputs=[TensorMetadata(name=INPUT, datatype="BF16", shape=[-1, layer.spec.k])],
        outputs=[
            TensorMetadata(name=OUTPUT, datatype="BF16", shape=[-1, layer.spec.n]),
            *(
                TensorMetadata(name=part.name, datatype="BF16", shape=[-1, part.stop - part.start])
                for part in layer.spec.parts
            ),
        ],
    )


def _config(layer: Layer, device: str, buckets: tuple[int, ...]) -> ModelConfig:
    error, routes, graphs, version = layer.error, layer.routes, layer.graphs, layer.version
    return ModelConfig(
        name=layer.name,
        platform=PLATFORM,
        version=str(version),
        n=layer.spec.n,
        k=layer.spec.k,
        bias=layer.spec.bias,
        parts=[FusedPart(**part._asdict()) for part in layer.spec.parts],
        backend=layer.backend.name,
        passed_over=[PassedOver(backend=name, reason=why) for name, why in routes.selection.passed_over],
        fallbacks=[
            Fallback(bucket=each.bucket, backend=each.backend, reason=each.reason)
            for each in routes.fallbacks
        ],
        plans=[_plan(layer, bucket, route) for bucket, route in sorted(routes.by_bucket.items())],
        eager=[EagerBucket(bucket=each.bucket, reason=each.reason) for each in graphs.eager]
        if graphs
        else [],
        graph_bytes=graphs.nbytes if graphs else 0,
        device=device,
        source=layer.source,
        source_dtype=layer.source_dtype,
        buckets=list(buckets),
        quantization_error=error.quantization if error else None,
        arithmetic_error=error.arithmetic if error else None,
        weight_fidelity=_fidelity(layer.fidelity_of(version)),
    )


def _fidelity(found: Fidelity | None) -> WeightFidelity | None:
    if found is None:
        return None
    return WeightFidelity.model_validate({"rows": found.rows, **found.figures()})


def _plan(layer: Layer, bucket: int, route: Route) -> BucketPlan:
    plan = route.plan
    return BucketPlan(
        bucket=bucket,
        backend=route.backend.name,
        layout=plan.layout,
        quantizer=plan.quantizer,
        graph=layer.has_graph(bucket),
    )
