"""Spans, as an exporter and a collector get them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gemmwire_service.app import create_app
from gemmwire_service.errors import SettingsError
from gemmwire_service.tracing import RequestSpans
from http_calls import infer, message
from serving import Served, serving, settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
STAGES = ["receive", "queue", "device", "send"]


def body() -> tuple[bytes, int]:
    return message(torch.ones(3, 128, dtype=torch.bfloat16))


@pytest.fixture
def spans(server: Served, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(server.engine.traffic, "watchers", [RequestSpans(provider.get_tracer("test"))])
    monkeypatch.setattr(server.engine.traffic, "watch_from_ns", 0)
    return exporter


def own(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_a_request_is_a_child_of_the_callers_span(server: Served, spans: InMemorySpanExporter) -> None:
    data, length = body()
    assert infer(server, "m.plain", data, length, traceparent=SAMPLED, x_request_id="abc").status == 200
    *stages, request = spans.get_finished_spans()
    assert request.name == "infer m.plain"
    assert request.parent is not None
    assert (request.parent.span_id, own(request)[0]) == (int(PARENT, 16), int(TRACE, 16))
    wanted = {
        "http.response.status_code": 200,
        "gemmwire.layer": "m.plain",
        "gemmwire.rows": 3,
        "gemmwire.bucket": 3,
        "gemmwire.backend": "emulation",
        "gemmwire.request_id": "abc",
    }
    assert wanted.items() <= dict(request.attributes or {}).items()
    assert [stage.name for stage in stages] == STAGES
    assert all(stage.parent and stage.parent.span_id == own(request)[1] for stage in stages)


def test_the_stages_fill_the_request(server: Served, spans: InMemorySpanExporter) -> None:
    """Guards: stages of another clock, or with gaps."""
    data, length = body()
    assert infer(server, "m.plain", data, length).status == 200
    *stages, request = spans.get_finished_spans()
    edges = [request.start_time, *(stage.end_time for stage in stages)]
    assert [stage.start_time for stage in stages] == edges[:-1]
    assert edges[-1] == request.end_time


def test_what_is_refused_says_why(server: Served, spans: InMemorySpanExporter) -> None:
    data, length = body()
    assert infer(server, "m.none", data, length).status == 404
    *_, request = spans.get_finished_spans()
    assert request.name == "infer", "a name that a client chose"
    assert dict(request.attributes or {})["error.type"] == "layer_unknown"
    assert request.status.is_ok


@pytest.mark.parametrize("traceparent", [UNSAMPLED, "00-nonsense", "\xff"])
def test_the_callers_choice_is_honoured_and_nonsense_ignored(
    server: Served, spans: InMemorySpanExporter, traceparent: str
) -> None:
    data, length = body()
    assert infer(server, "m.plain", data, length, traceparent=traceparent).status == 200
    found = spans.get_finished_spans()
    assert len(found) == (0 if traceparent == UNSAMPLED else 5)


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector -> (its URL, the bodies that came to /v1/traces)."""
    bodies: list[bytes] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                bodies.append(data)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def test_the_collector_has_the_last_span_when_the_server_has_stopped(checkpoint: Path) -> None:
    data, length = body()
    with collector() as (url, bodies):
        with serving(settings(model=(f"m={checkpoint}",), otlp_endpoint=url)) as served:
            assert infer(served, "m.plain", data, length, traceparent=SAMPLED).status == 200
        requests = [ExportTraceServiceRequest.FromString(each) for each in bodies]
    resources = [resource for request in requests for resource in request.resource_spans]
    named = {
        pair.key: pair.value.string_value for resource in resources for pair in resource.resource.attributes
    }
    assert named["service.name"] == "gemmwire"
    names = [span.name for each in resources for scope in each.scope_spans for span in scope.spans]
    assert sorted(names) == sorted([*STAGES, "infer m.plain"])


def test_without_the_packages_it_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: spans that are asked for and silently not made."""
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"gemmwire\[otel\]"):
        create_app(settings(random_layer=("try=8x32",), otlp_endpoint="http://127.0.0.1:4318"))
