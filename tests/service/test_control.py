"""The control plane, and the service's life as a probe sees it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.responses import JSONResponse
from safetensors.torch import save_file
from torch import Tensor

import gemmwire_service.loader as loader
from gemmwire_service.app import create_app
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.engine import State
from gemmwire_service.errors import BackendError
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
    assert config["scale_rule"] == "ceil(log2(amax / 448)), E8M0 per 32 along K"
    assert 0 < config["quantization_error"] < 0.1
    assert config["arithmetic_error"] < 2**-7
    assert config["buckets"][:5] == [1, 2, 3, 4, 6]
    fidelity = config["weight_fidelity"]
    assert fidelity["rows"] == 130
    assert 0.02 < fidelity["relative_error"] < 0.06
    assert fidelity["saturated"] == 0


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

    def open_late(path: Path | str, **options: Any) -> Any:
        assert gate.wait(30)
        return real(path, **options)

    monkeypatch.setattr(loader, "open_checkpoint", open_late)
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


def test_a_backend_that_computes_a_layer_wrongly_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Emulation.forward

    def doubled(self: Emulation, x: Tensor, weight: Any, plan: Any, out: Tensor) -> None:
        real(self, x, weight, plan, out)
        out[:, -1] *= 2

    monkeypatch.setattr(Emulation, "forward", doubled)
    with (
        pytest.raises(BackendError, match="wrongly"),
        serving(settings(model=(f"m={checkpoint}",))),
    ):
        pass


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-60, 2.0**100, 2.0**118], ids=lambda s: f"{s:.0e}")
def test_weights_of_any_size_are_served(scale: float, tmp_path: Path) -> None:
    """Guards: a self-check that takes an overflow or underflow of its own rows for a fault."""
    path = tmp_path / "model.safetensors"
    save_file({"w.weight": torch.full((8, 64), scale), "w.bias": torch.full((8,), scale)}, path)
    with serving(settings(model=(f"m={path}",))) as served:
        x = torch.full((1, 64), 0.5)
        y = infer(served, "m.w", *message(x)).tensor
        if scale > 2.0**-100:
            assert torch.equal(y, torch.full((1, 8), 33 * scale))


def test_what_is_skipped_and_what_was_decided_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w.weight": torch.ones(8, 64), "norm.weight": torch.ones(8)}, path)
    with caplog.at_level("INFO", "gemmwire"), serving(settings(model=(f"m={path}",))):
        pass
    assert any("norm.weight" in line and "1-D" in line for line in caplog.messages)


def test_a_middleware_that_a_user_adds_is_not_passed_by(checkpoint: Path) -> None:
    """Guards: access control in front of everything but infer."""
    app = create_app(settings(model=(f"m={checkpoint}",)))
    seen: list[str] = []

    @app.middleware("http")
    async def noting(request: Any, call_next: Any) -> Any:
        seen.append(request.url.path)
        return JSONResponse({"error": "no"}, status_code=401)

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(sent_message: Any) -> None:
        sent.append(sent_message)

    path = "/v2/models/m.plain/infer"
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 401
    assert seen == ["/v2/models/m.plain/infer"]


def test_a_backend_that_cannot_is_refused_before_the_weight_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SafetensorsCheckpoint, "read", lambda self, name: pytest.fail(f"read {name}"))
    with (
        pytest.raises(BackendError, match="flashinfer_trtllm"),
        serving(settings(model=(f"m={checkpoint}",), backend="flashinfer_trtllm")),
    ):
        pass


@pytest.mark.parametrize("largest", [1, 3])
def test_a_ladder_below_the_rows_of_the_first_forward_serves(checkpoint: Path, largest: int) -> None:
    with serving(settings(model=(f"m={checkpoint}",), max_bucket=largest)) as served:
        assert infer(served, "m.plain", *message(torch.ones(5, 128))).status == 200


def test_a_weight_that_no_backend_holds_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w.weight": torch.full((8, 64), 3.39e38)}, path)
    with (
        pytest.raises(BackendError, match=r"'m\.w'"),
        serving(settings(model=(f"m={path}",))),
    ):
        pass
