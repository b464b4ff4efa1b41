"""OpenTelemetry spans of infer requests, made when a request has its answer.

Their times are taken whether there are spans or not, so that without --otlp-endpoint they cost nothing. What
else OpenTelemetry has (sampling, resources, headers for the collector) its own OTEL_* variables set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING

from . import __version__
from .backlog import Answer
from .errors import SettingsError
from .infer import request_id
from .traffic import Finished, Traffic

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_EXPORT_S = 5.0
_LAST_S = 3.0  # a collector that does not answer must not hold the server's end for long
_CARRIED = (b"traceparent", b"tracestate")

Value = str | int


def trace_requests(traffic: Traffic, endpoint: str) -> Callable[[], None]:
    """Send spans to the collector at `endpoint`, by OTLP over HTTP; "" for none.

    What is returned sends the last of them and stops. Errors: SettingsError without OpenTelemetry's packages.
    """
    if not endpoint:
        return _nothing
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--otlp-endpoint is set, and OpenTelemetry is not installed ({error}); run: "
            "pip install 'gemmwire[otel]'",
            expected="gemmwire[otel]",
        ) from None
    facts = {"service.version": __version__}
    if "OTEL_SERVICE_NAME" not in os.environ:
        facts["service.name"] = "gemmwire"
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    traffic.watch(RequestSpans(provider.get_tracer("gemmwire", __version__)), 0)

    def stop() -> None:
        last = Thread(target=provider.shutdown, name="gemmwire-last-spans", daemon=True)
        last.start()
        last.join(_LAST_S)

    return stop


def _nothing() -> None:
    """Without spans there is nothing to stop."""


class RequestSpans:
    """A span for each request, a child of the caller's (traceparent), with a child for each stage."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._extract = TraceContextTextMapPropagator().extract
        self._within = set_span_in_context
        self._server = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)

    def __call__(self, finished: Finished) -> None:
        wall = time.time_ns() - time.monotonic_ns()
        carrier = {
            name.decode(): finished.headers[name].decode("latin-1")
            for name in _CARRIED
            if name in finished.headers
        }
        span = self._tracer.start_span(
            f"infer {finished.layer}".rstrip(),
            context=self._extract(carrier),
            kind=self._server,
            start_time=finished.began + wall,
        )
        if span.is_recording():
            span.set_attributes(attributes(finished))
            if finished.status >= 500:
                span.set_status(self._failed)
            context = self._within(span)
            for name, start, end in finished.stages():
                stage = self._tracer.start_span(name, context=context, start_time=start + wall)
                stage.end(end + wall)
        span.end(finished.ended + wall)


def attributes(finished: Finished) -> dict[str, Value]:
    found: dict[str, Value] = {
        "http.request.method": "POST",
        "http.response.status_code": finished.status,
        "gemmwire.layer": finished.layer,
    }
    identity = request_id(finished.headers)
    if identity:
        found["gemmwire.request_id"] = identity
    if finished.reason:
        found["error.type"] = finished.reason
    item = finished.item
    if item is not None:
        found["gemmwire.rows"] = item.rows
        if isinstance(item.outcome, Answer):
            found["gemmwire.bucket"] = item.outcome.bucket
            found["gemmwire.backend"] = item.outcome.backend
            found["gemmwire.version"] = item.outcome.version
    return found
