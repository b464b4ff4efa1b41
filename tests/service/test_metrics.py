"""What /metrics says, by both paths of infer."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from safetensors.torch import save, save_file

from gemmwire_service.traffic import BOUNDS, Finished, Histogram, Traffic
from http_calls import HEADER_LENGTH, call, infer, json_message, message
from oracle import spread
from scraped import Scrape, change
from serving import Served, hold, serving, settings, until

K = 128
N = 64
STAGES = ("receive", "queue", "device", "send")


def rows(m: int) -> tuple[bytes, int]:
    return message(torch.ones(m, K, dtype=torch.bfloat16))


def test_answers_and_refusals_are_counted_by_layer_and_code(server: Served) -> None:
    """Guards: a path of infer that forgets to count, or counts twice."""
    body, length = rows(3)
    empty, empty_length = message(torch.ones(0, K, dtype=torch.bfloat16))
    before = Scrape(server)
    assert infer(server, "m.plain", body, length).status == 200
    assert infer(server, "m.plain", json_message(torch.ones(2, K))).status == 200
    assert infer(server, "m.plain", empty, empty_length).status == 200
    assert infer(server, "m.plain", body[:-2], length).status == 400
    assert infer(server, "m.wide", body, length).status == 400
    assert infer(server, "m.none", body, length).status == 404
    after = Scrape(server)
    counted = {
        (layer, code): change(before, after, "gemmwire_requests_total", layer=layer, code=code)
        for layer in ("m.plain", "m.wide", "m.none", "")
        for code in ("200", "400", "404")
    }
    assert {key: count for key, count in counted.items() if count} == {
        ("m.plain", "200"): 3,
        ("m.plain", "400"): 1,
        ("m.wide", "400"): 1,
        ("", "404"): 1,
    }
    reasons = ("frame_invalid", "k_mismatch", "layer_unknown")
    assert [change(before, after, "gemmwire_rejects_total", reason=reason) for reason in reasons] == [1, 1, 1]
    assert change(before, after, "gemmwire_layer_rows_total", layer="m.plain") == 5


def test_layers_that_are_not_served_make_no_labels(server: Served) -> None:
    """Guards: a client that fills the memory of the server, and of Prometheus, with names."""
    body, length = rows(1)
    for index in range(20):
        assert infer(server, f"guess-{index}", body, length).status == 404
    names = Scrape(server).labels("gemmwire_requests_total", "layer")
    assert names <= {*server.engine.layers, ""}


def test_the_reasons_are_a_bounded_set() -> None:
    """Guards: an error whose code is made of what the client sent."""
    traffic = Traffic()
    for index in range(1000):
        traffic.reject(f"reason-{index}")
    assert len(traffic.rejects) <= 65
    assert sum(traffic.rejects.values()) == 1000


def test_the_stages_of_a_request_add_up_to_its_total(server: Served) -> None:
    """Guards: a stage that is left out or counted twice, and a histogram that is not cumulative."""
    body, length = rows(2)
    before = Scrape(server)
    for _ in range(5):
        assert infer(server, "m.plain", body, length).status == 200
    assert infer(server, "m.plain", b"{", 1).status == 400  # a refusal has no stages
    after = Scrape(server)
    name = "gemmwire_stage_seconds"
    for stage in (*STAGES, "total"):
        assert change(before, after, f"{name}_count", stage=stage) == 5
        counts = [after.value(f"{name}_bucket", stage=stage, le=repr(bound / 1e9)) for bound in BOUNDS]
        assert counts == sorted(counts)
        assert counts[-1] <= after.value(f"{name}_bucket", stage=stage, le="+Inf")
        assert after.value(f"{name}_bucket", stage=stage, le="+Inf") == after.value(
            f"{name}_count", stage=stage
        )
    parts = sum(change(before, after, f"{name}_sum", stage=stage) for stage in STAGES)
    assert parts == pytest.approx(change(before, after, f"{name}_sum", stage="total"), rel=1e-6)


@pytest.mark.parametrize("bound", range(len(BOUNDS)))
def test_a_time_belongs_to_the_first_bound_that_is_not_less(bound: int) -> None:
    """Guards: le read as 'less'."""
    histogram = Histogram()
    histogram.add(np.array([BOUNDS[bound], BOUNDS[bound] + 1]))
    assert (histogram.counts[bound], histogram.counts[bound + 1]) == (1, 1)


def test_forwards_tell_how_full_they_were(server: Served) -> None:
    """Guards: an occupancy that counts the zeros of a bucket as rows."""
    body, length = rows(5)
    before = Scrape(server)
    assert infer(server, "m.plain", body, length).status == 200
    after = Scrape(server)
    names = ("forwards", "forward_requests", "forward_rows", "forward_places")
    changed = [change(before, after, f"gemmwire_{name}_total", bucket="6") for name in names]
    assert changed == [1, 1, 5, 6]
    assert change(before, after, "gemmwire_forward_seconds_total", bucket="6") > 0
    assert change(before, after, "gemmwire_layer_device_seconds_total", layer="m.plain") > 0


def test_chunks_have_room_for_a_bucket_each(checkpoint: Path) -> None:
    """Guards: more rows than places."""
    with serving(settings(model=(f"m={checkpoint}",), max_bucket=4)) as served:
        body, length = rows(9)
        assert infer(served, "m.plain", body, length).status == 200
        after = Scrape(served)
        names = ("forwards", "forward_requests", "forward_rows", "forward_places")
        assert [after.value(f"gemmwire_{name}_total", bucket="4") for name in names] == [3, 1, 9, 12]


def test_the_queue_is_told_in_requests_rows_and_bytes(server: Served) -> None:
    """Guards: a depth that does not fall again."""
    names = ("requests", "rows", "bytes")
    gate = threading.Event()
    hold(server.engine, gate)
    body, length = rows(3)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(infer, server, "m.plain", body, length) for _ in range(2)]
        until(lambda: server.engine.waiting == 2, "the requests did not come to the queue")
        held = Scrape(server)
        gate.set()
        assert [each.result().status for each in calls] == [200, 200]
    depth = {name: held.value(f"gemmwire_queue_{name}") for name in names}
    assert depth == {"requests": 2, "rows": 6, "bytes": 6 * (K + N) * 2}
    after = Scrape(server)
    assert [after.value(f"gemmwire_queue_{name}") for name in names] == [0, 0, 0]


def test_a_client_that_leaves_is_counted(server: Served) -> None:
    """Guards: requests that vanish from the numbers."""
    gate = threading.Event()
    hold(server.engine, gate)
    before = Scrape(server)
    body, length = rows(1)
    head = f"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: a\r\n{HEADER_LENGTH}: {length}\r\n"
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.engine.waiting == 1, "the request did not come to the queue")
        until(
            lambda: change(before, Scrape(server), "gemmwire_clients_left_total") == 1,
            "the client's leave was not counted",
        )
    finally:
        gate.set()


def test_a_refit_raises_the_version(checkpoint: Path) -> None:
    with serving(settings(model=(f"m={checkpoint}",))) as served:
        before = Scrape(served)
        new = save({"weight": spread(64, K, seed=3) / 2**14})
        reply = call(served, "PUT", "/v2/repository/models/m.plain/weights", new)
        assert reply.status == 200, reply.body
        after = Scrape(served)
    assert change(before, after, "gemmwire_refits_total") == 1
    assert change(before, after, "gemmwire_layer_version", layer="m.plain") == 1


def test_what_is_served_has_its_facts(server: Served) -> None:
    scrape = Scrape(server)
    facts = {"layer": "m.plain", "backend": "emulation", "n": "64", "k": str(K), "source_dtype": "F32"}
    assert scrape.value("gemmwire_layer_info", **facts) == 1
    assert scrape.value("gemmwire_layers") == len(server.engine.layers)
    assert scrape.value("gemmwire_ready") == 1
    assert scrape.value("gemmwire_layer_weight_bytes", layer="m.plain") >= 64 * K  # of FP8 at least
    assert scrape.value("gemmwire_queue_requests_limit") == 1024
    assert scrape.labels("gemmwire_info", "version")


def test_openmetrics_is_given_to_whom_takes_it(server: Served) -> None:
    """Guards: an exposition that its own format's parser refuses."""
    accept = "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"
    reply = call(server, "GET", "/metrics", headers={"Accept": accept})
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name for family in text_string_to_metric_families(reply.body.decode())}
    assert {"gemmwire_requests", "gemmwire_stage_seconds"} <= families
    plain = call(server, "GET", "/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_a_name_with_quotes_and_backslashes_is_one_label(tmp_path: Path) -> None:
    """Guards: a checkpoint whose names write metrics of their own."""
    name = 'a"} 1 evil{b="\\'
    path = tmp_path / "model.safetensors"
    save_file({f"{name}.weight": spread(8, 32, seed=1) / 2**14}, path)
    with serving(settings(model=(f"m={path}",))) as served:
        scrape = Scrape(served)
        assert list(served.engine.layers) == [f"m.{name}"]
    assert scrape.labels("gemmwire_layer_version", "layer") == {f"m.{name}"}
    assert not any("evil" in each for each in scrape.names())


def test_a_layer_that_goes_takes_its_labels_with_it(checkpoint: Path) -> None:
    """Guards: labels of layers that are long gone, and totals that fall, which reads as a restart."""
    with serving(settings(model=(f"m={checkpoint}",))) as served:
        body, length = rows(1)
        assert infer(served, "m.plain", body, length).status == 200
        before = Scrape(served)
        served.engine.exchange([served.engine.layers["m.plain"]], [])
        after = Scrape(served)
    assert "m.plain" in before.labels("gemmwire_requests_total", "layer")
    assert "m.plain" not in after.labels("gemmwire_requests_total", "layer")
    assert change(before, after, "gemmwire_forwards_total", bucket="1") == 0
    assert change(before, after, "gemmwire_stage_seconds_count", stage="total") == 0


def test_a_watcher_that_fails_costs_no_answer(
    server: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a full disk of the log that ends connections."""

    def fails(finished: Finished) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(server.engine.traffic, "watchers", [fails])
    monkeypatch.setattr(server.engine.traffic, "watch_from_ns", 0)
    body, length = rows(1)
    assert infer(server, "m.plain", body, length).status == 200
    assert "a request could not be reported" in caplog.text
