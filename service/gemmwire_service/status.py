"""GET /, a page to look at, and GET /status, the numbers that it draws."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Response

from . import __version__
from .engine import Engine, State
from .layer import Layer
from .page import Page
from .settings import Settings
from .traffic import BOUNDS, Traffic


def status_routes(engine: Engine, device: str, buckets: tuple[int, ...], settings: Settings) -> APIRouter:
    routes = APIRouter()
    page = Page("index.html")

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        return page.response()

    @routes.get("/status", summary="What the status page draws", response_class=Response)
    async def status() -> Response:
        body = json.dumps(document(engine, device, buckets, settings), separators=(",", ":"))
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    return routes


def document(engine: Engine, device: str, buckets: tuple[int, ...], settings: Settings) -> dict[str, Any]:
    """Counts are since the start; the page has rates from the difference of two of these. Times in us."""
    traffic = engine.traffic
    traffic.count_answers()
    return {
        "version": __version__,
        "state": engine.state.value,
        "failure": str(engine.failure) if engine.state is State.FAILED else None,
        "device": device,
        "now": time.time(),
        "began": traffic.began,
        "buckets": buckets,
        "queue": {
            "requests": engine.waiting,
            "rows": engine.waiting_rows,
            "bytes": engine.waiting_bytes,
            "most_requests": settings.max_queue,
            "most_bytes": settings.max_queue_bytes,
        },
        **_counts(traffic),
        **_layers(engine.layers.values(), buckets),
    }


def _counts(traffic: Traffic) -> dict[str, Any]:
    return {
        "codes": traffic.codes,
        "rejects": traffic.rejects,
        "recent": [refused._asdict() for refused in reversed(traffic.recent)],
        "left": traffic.left,
        "refits": traffic.refits,
        "bounds": [bound / 1000 for bound in BOUNDS],
        "stages": {
            name: {"counts": histogram.counts, "us": histogram.ns / 1000}
            for name, histogram in traffic.stages.items()
        },
        "forwards": [
            {
                "bucket": bucket,
                "count": forwards.count,
                "requests": forwards.requests,
                "rows": forwards.rows,
                "us": forwards.ns / 1000,
            }
            for bucket, forwards in sorted(traffic.buckets.items())
        ],
    }


def _layers(layers: Iterable[Layer], buckets: tuple[int, ...]) -> dict[str, Any]:
    """`passed_over` holds each list of reasons once: the layers of a model mostly have the same."""
    passed_over: dict[tuple[tuple[str, str], ...], int] = {}
    rows = []
    for layer in layers:
        version = layer.version
        fidelity = layer.fidelity_of(version)
        why = tuple((name, reason) for name, reason in layer.routes.selection.passed_over)
        rows.append(
            {
                "name": layer.name,
                "n": layer.spec.n,
                "k": layer.spec.k,
                "backend": layer.backend.name,
                "passed_over": passed_over.setdefault(why, len(passed_over)),
                "mixed": bool(layer.routes.fallbacks),
                "version": version,
                "weight_error": fidelity.relative_error if fidelity else None,
                "codes": layer.stats.codes,
                "rows": layer.stats.inferences,
                "device_us": sum(stages.ns for stages in layer.stats.buckets.values()) / 1000,
                "bucket_us": [_measured(layer, bucket) for bucket in buckets],
            }
        )
    return {"layers": rows, "passed_over": [list(why) for why in passed_over]}


def _measured(layer: Layer, bucket: int) -> float | None:
    """Microseconds of a forward: the mean of those that were asked for, else what the warm-up took."""
    stages = layer.stats.buckets.get(bucket)
    if stages is not None:
        return round(stages.ns / stages.forwards / 1000, 1)
    program = layer.programs.get(bucket)
    return round(program.microseconds, 1) if program and math.isfinite(program.microseconds) else None
