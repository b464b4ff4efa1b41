"""GET /metrics: what Prometheus takes, made from the plain numbers of `traffic` and `stats` when it asks.

Label sets are bounded: `layer` is one that is served, or "" for all that are not; `code`, `reason` and
`stage` are closed sets of this program; `bucket` is one of the ladder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from . import __version__
from .engine import Engine, State
from .layer import Layer
from .settings import Settings
from .traffic import BOUNDS, Forwards, Histogram, Traffic

_EOF = b"# EOF\n"  # of OpenMetrics
_S = 1e-9  # seconds of a nanosecond
_LES = [repr(bound / 1e9) for bound in BOUNDS]

Sample = tuple[Sequence[str], float]


def metrics_routes(engine: Engine, device: str, settings: Settings) -> APIRouter:
    routes = APIRouter()
    registry = CollectorRegistry(auto_describe=False)
    # First the process's own, of the names that every dashboard of a Python program knows.
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(EngineCollector(engine, device, settings))

    @routes.get("/metrics", summary="For Prometheus, as text or as OpenMetrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await _exposition(registry, encode)
        return Response(body, headers={"content-type": content_type})

    return routes


class _One(Collector):
    """A registry of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


async def _exposition(registry: CollectorRegistry, encode: Callable[[Collector], bytes]) -> bytes:
    """Metric by metric, with requests in between: those of hundreds of layers take many milliseconds."""
    pieces: list[bytes] = []
    end = b""
    for metric in registry.collect():
        piece = encode(_One(metric))
        if piece.endswith(_EOF):
            piece, end = piece.removesuffix(_EOF), _EOF
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join([*pieces, end])


class EngineCollector(Collector):
    def __init__(self, engine: Engine, device: str, settings: Settings) -> None:
        self._engine = engine
        self._device = device
        self._settings = settings

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        engine.traffic.count_answers()
        info = {"version": __version__, "device": self._device}
        yield InfoMetricFamily("gemmwire", "The server", value=info)
        yield _gauge("gemmwire_ready", "1 while it takes requests", engine.state is State.READY)
        yield _gauge("gemmwire_layers", "Layers that are served", len(engine.layers))
        yield from _queue(engine, self._settings)
        yield from _requests(engine)
        yield _stages(engine.traffic)
        yield from _forwards(engine.traffic)
        yield from _layers(engine.layers.values())


def _queue(engine: Engine, settings: Settings) -> Iterator[Metric]:
    """Requests from their place at the engine to their answer."""
    yield _gauge("gemmwire_queue_requests", "Requests waiting or computing", engine.waiting)
    yield _gauge("gemmwire_queue_rows", "Their rows", engine.waiting_rows)
    yield _gauge("gemmwire_queue_bytes", "Bytes of their tensors, x and y", engine.waiting_bytes)
    yield _gauge("gemmwire_receiving_bytes", "Bytes of bodies that are coming", engine.held.receiving)
    yield _gauge("gemmwire_unread_bytes", "Bytes of answers not read yet", engine.held.unread)
    yield _gauge("gemmwire_queue_requests_limit", "One more is refused (--max-queue)", settings.max_queue)
    yield _gauge("gemmwire_queue_rows_limit", "More are refused (--max-queue-rows)", settings.max_queue_rows)
    yield _gauge(
        "gemmwire_queue_bytes_limit",
        "More are refused, with those that come or are unread (--max-queue-bytes)",
        settings.max_queue_bytes,
    )


def _requests(engine: Engine) -> Iterator[Metric]:
    traffic = engine.traffic
    by_code = [
        ((layer.name, str(code)), count)
        for layer in engine.layers.values()
        for code, count in layer.stats.codes.items()
    ]
    by_code += [(("", str(code)), count) for code, count in traffic.unserved.items()]
    yield _counter("gemmwire_requests", "Infer requests answered, by HTTP status", by_code, ("layer", "code"))
    rejects = [((reason,), count) for reason, count in traffic.rejects.items()]
    yield _counter(
        "gemmwire_rejects", "Refusals of any route, by the code of the error", rejects, ("reason",)
    )
    yield _counter(
        "gemmwire_clients_left", "Infer requests whose client left before the answer", [((), traffic.left)]
    )
    yield _counter("gemmwire_refits", "Weights of a layer replaced", [((), traffic.refits)])


def _stages(traffic: Traffic) -> Metric:
    family = HistogramMetricFamily(
        "gemmwire_stage_seconds",
        "Answered infer requests: receive (from the end of the head to the queue), queue, device, send (from "
        "the device to the transport), and total",
        labels=("stage",),
    )
    for name, histogram in traffic.stages.items():
        family.add_metric((name,), _cumulative(histogram), histogram.ns * _S)
    return family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for le, count in zip([*_LES, "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((le, total))
    return buckets


def _forwards(traffic: Traffic) -> Iterator[Metric]:
    numbers: list[tuple[str, str, Callable[[Forwards], float]]] = [
        ("gemmwire_forwards", "Forwards on the device", lambda of: of.count),
        ("gemmwire_forward_requests", "Requests in them", lambda of: of.requests),
        ("gemmwire_forward_rows", "Rows in them", lambda of: of.rows),
        ("gemmwire_forward_places", "Rows that they had room for", lambda of: of.places),
        ("gemmwire_forward_seconds", "Device time of them", lambda of: of.ns * _S),
    ]
    buckets = sorted(traffic.buckets.items())
    for name, what, number in numbers:
        samples = [((str(bucket),), number(forwards)) for bucket, forwards in buckets]
        yield _counter(name, f"{what}, by bucket", samples, ("bucket",))


def _layers(layers: Iterable[Layer]) -> Iterator[Metric]:
    served = list(layers)
    facts = [
        ((la.name, la.backend.name, str(la.spec.n), str(la.spec.k), la.source_dtype), 1.0) for la in served
    ]
    yield _labelled(
        GaugeMetricFamily,
        "gemmwire_layer_info",
        "What is served: y[..., n] of x[..., k]",
        facts,
        ("layer", "backend", "n", "k", "source_dtype"),
    )
    gauges: list[tuple[str, str, Callable[[Layer], float]]] = [
        ("gemmwire_layer_version", "Version of the weight; a refit adds one", lambda la: la.version),
        ("gemmwire_layer_weight_bytes", "Memory of the weight", lambda la: la.routes.nbytes),
        ("gemmwire_layer_graphs", "CUDA graphs", lambda la: la.graph_count),
        ("gemmwire_layer_graph_bytes", "Memory of them", lambda la: la.graphs.nbytes if la.graphs else 0),
    ]
    for name, what, number in gauges:
        samples: list[Sample] = [((layer.name,), number(layer)) for layer in served]
        yield _labelled(GaugeMetricFamily, name, what, samples, ("layer",))
    counters: list[tuple[str, str, Callable[[Layer], float]]] = [
        ("gemmwire_layer_rows", "Rows answered", lambda la: la.stats.inferences),
        ("gemmwire_layer_queue_seconds", "Time that answered requests waited", _queue_seconds),
        ("gemmwire_layer_device_seconds", "Device time of the forwards", _device_seconds),
    ]
    for name, what, number in counters:
        yield _counter(name, what, [((layer.name,), number(layer)) for layer in served], ("layer",))


def _queue_seconds(layer: Layer) -> float:
    return layer.stats.queue.ns * _S


def _device_seconds(layer: Layer) -> float:
    return sum(stages.ns for stages in layer.stats.buckets.values()) * _S


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value=float(value))


def _counter(name: str, what: str, samples: Iterable[Sample], labels: Sequence[str] = ()) -> Metric:
    return _labelled(CounterMetricFamily, name, what, samples, labels)


def _labelled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    what: str,
    samples: Iterable[Sample],
    labels: Sequence[str],
) -> Metric:
    family = kind(name, what, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family
