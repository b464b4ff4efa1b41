"""The control plane, and the service's life as a probe sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gemmwire_service.loading as loading
from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.engine import State
from http_calls import call, infer, message
from serving import Served, serving, settings, until


def get(server: Served, path: str) -> Any:
    reply = call(server, "GET", path)
    assert reply.status == 200, reply.body
    return reply.json


def test_server_metadata_lists_only_what_works(server: Served) -> None:
    document = get(server, "/v2")
    assert document["name"] == "gemmwire"
    assert "binary_tensor_data" in document["extensions"]
    assert "system_shared_memory" not in document["extensions"]


def test_model_metadata(server: Served) -> None:
    for path in ("/v2/models/m.ragged", "/v2/models/m.ragged/versions/1"):
        document = get(server, path)
        assert document["versions"] == ["1"]
        assert document["inputs"] == [{"name": "x", "datatype": "BF16", "shape": [-1, 33]}]
        assert document["outputs"] == [{"name": "y", "datatype": "BF16", "shape": [-1, 130]}]


def test_config_says_which_backend_and_why_not_a_better_one(server: Served) -> None:
    config = get(server, "/v2/models/m.ragged/config")
    assert (config["n"], config["k"], config["bias"], config["backend"]) == (130, 33, True, "emulation")
    assert [entry["backend"] for entry in config["passed_over"]] == [
        "flashinfer_trtllm",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "cublas",
    ]
    assert all(entry["reason"] for entry in config["passed_over"])
    assert config["source_dtype"] == "F32"
    assert 0 < config["quantization_error"] < 0.1
    assert config["arithmetic_error"] < 2**-7
    assert config["buckets"][:4] == [1, 2, 4, 8]


def test_the_index_lists_every_layer(server: Served) -> None:
    reply = call(server, "POST", "/v2/repository/index", b"{}", {"Content-Type": "application/json"})
    entries = {entry["name"]: entry for entry in reply.json}
    assert len(entries) == 4 + 29
    assert (
        entries["demo.blocks.0.ffn.W2"] | {"version": "1", "state": "READY", "k": 341, "n": 128}
        == entries["demo.blocks.0.ffn.W2"]
    )
    assert call(server, "POST", "/v2/repository/index").status == 200


def test_statistics_advance_and_are_the_same_by_both_routes(server: Served) -> None:
    before = get(server, "/v2/models/m.plain/stats")["model_stats"][0]
    infer(server, "m.plain", *message(torch.ones(3, 128)))
    after = get(server, "/v2/models/m.plain/stats")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    everything = get(server, "/v2/models/stats")["model_stats"]
    assert after in everything


def test_every_ready_route_agrees(server: Served) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/m.plain/ready"):
        assert call(server, "GET", path).status == 200
    assert call(server, "GET", "/v2/models/nowhere/ready").status == 404


def test_the_openapi_document_has_the_infer_route_and_no_dangling_reference(server: Served) -> None:
    document = get(server, "/openapi.json")
    assert "post" in document["paths"]["/v2/models/{layer}/infer"]
    references = _references(document)
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references <= known


def _references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(value) for value in node.values()))
    return set().union(*(_references(value) for value in node)) if isinstance(node, list) else set()


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Loading stops before its first layer until the event is set."""
    gate = threading.Event()
    real = open_checkpoint

    def open_late(path: Path | str) -> Any:
        assert gate.wait(30)
        return real(path)

    monkeypatch.setattr(loading, "open_checkpoint", open_late)
    yield gate
    gate.set()


def test_live_answers_while_loading_and_ready_does_not(checkpoint: Path, slow_load: threading.Event) -> None:
    with serving(settings(model=(f"m={checkpoint}",)), wait=False) as served:
        assert call(served, "GET", "/v2/health/live").status == 200
        assert call(served, "GET", "/v2/health/ready").status == 503
        for path in ("/v2/models/m.plain", "/v2/models/m.plain/ready", "/v2/models/m.plain/config"):
            early = call(served, "GET", path)
            assert (early.status, early.json["code"]) == (503, "not_ready"), path
        refused = infer(served, "m.plain", *message(torch.ones(1, 128)))
        assert (refused.status, refused.json["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) >= 1
        slow_load.set()
        until(lambda: served.engine.state is State.READY, "the layers were not loaded")
        assert call(served, "GET", "/v2/health/ready").status == 200
        assert infer(served, "m.plain", *message(torch.ones(1, 128))).status == 200


def test_two_checkpoints_without_names_of_their_own_are_refused(checkpoint: Path) -> None:
    with (
        pytest.raises(Exception, match=r"Two layers are named '.*--model NAME=PATH"),
        serving(settings(model=(str(checkpoint), str(checkpoint)))),
    ):
        pass
