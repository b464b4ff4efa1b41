"""New weights as a client sends them: a safetensors file in pieces, once, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load

import gemmwire
from gemmwire import Client, Conflict, InputError, InvalidArgument, RefitIncomplete, TransportError
from gemmwire.http1 import Reply, Request
from http_calls import raw
from scripted_layer import Recorded, client
from scripted_server import Served, Session, answer, serve

W = torch.arange(12, dtype=torch.float32).reshape(3, 4)
B = torch.tensor([0.5, -1.0, 0.25])
CODES = torch.arange(3 * 40, dtype=torch.uint8).reshape(3, 40) % 0x7F
SCALE = torch.tensor([[127, 0], [254, 1], [120, 130]], dtype=torch.uint8)
RESULT = {
    "name": "a",
    "version": "4",
    "previous_version": "3",
    "quantization_error": 0.03,
    "arithmetic_error": 0.001,
    "seconds": {"read": 0.1, "exchange": 0.2},
}


def sent(**weights: Any) -> tuple[dict[str, torch.Tensor], Request]:
    """What the safetensors library reads from a refit of layer a."""
    transport = Recorded(body=RESULT)
    client(transport).refit("a", **weights)
    (request,) = transport.requests
    return load(b"".join(request.body)), request


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_float_weight_and_its_bias_are_what_the_library_reads(dtype: torch.dtype, framework: str) -> None:
    """Guards: offsets, an order of elements or a dtype's name that only our own server understands."""
    weight: Any = W.to(dtype)
    if framework == "numpy":
        name = str(dtype).removeprefix("torch.")
        weight = W.numpy().astype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    read, request = sent(weight=weight, bias=B)
    assert sorted(read) == ["bias", "weight"]
    assert (read["weight"].dtype, read["weight"].tolist()) == (dtype, W.tolist())
    assert (read["bias"].dtype, read["bias"].tolist()) == (torch.float32, B.tolist())
    assert (request.method, request.path) == ("PUT", "/p/v2/repository/models/a/weights")


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        pytest.param(CODES, SCALE, id="bytes"),
        pytest.param(CODES.view(torch.float8_e4m3fn), SCALE.view(torch.float8_e8m0fnu), id="torch"),
        pytest.param(
            CODES.numpy().view(ml_dtypes.float8_e4m3fn),
            SCALE.numpy().view(ml_dtypes.float8_e8m0fnu),
            id="ml_dtypes",
        ),
    ],
)
def test_quantized_bytes_go_as_they_are(codes: Any, scale: Any) -> None:
    """Guards: codes that are converted as if they were numbers."""
    read, _ = sent(weight=codes, scale=scale)
    assert read["weight"].dtype == torch.float8_e4m3fn
    assert raw(read["weight"]) == raw(CODES)
    assert raw(read["weight_scale"]) == raw(SCALE)


def test_each_tensor_lies_on_a_multiple_of_its_element() -> None:
    """Guards: a server that has to copy a weight because an FP32 bias came behind an odd BF16 one."""
    transport = Recorded(body=RESULT)
    client(transport).refit("a", W[:, :3].to(torch.bfloat16), bias=B)
    header, *_ = transport.requests[0].body
    entries = json.loads(bytes(header[8:]))
    assert len(header) % 64 == 0
    assert entries["bias"]["data_offsets"][0] % 4 == 0
    assert entries["weight"]["data_offsets"][0] % 2 == 0


def test_a_contiguous_weight_is_sent_from_its_own_memory() -> None:
    """Guards: a second copy of every weight in an RL loop; a parameter that has to be detached by hand."""
    transport = Recorded(body=RESULT)
    weight = torch.nn.Parameter(W.clone())
    client(transport).refit("a", weight)
    _, tensor = transport.requests[0].body
    assert np.frombuffer(tensor, np.float32).__array_interface__["data"][0] == weight.data_ptr()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        pytest.param({"weight": W[0]}, "weight is .4.; .N, K. is needed", id="vector"),
        pytest.param({"weight": W.double()}, "weight is float64; float32 or", id="float64"),
        pytest.param({"weight": W.tolist()}, "weight is of type list", id="list"),
        pytest.param({"weight": W[:0]}, "weight is .0, 4.: it has no elements", id="empty"),
        pytest.param({"weight": CODES}, "weight is uint8", id="codes-without-scale"),
        pytest.param({"weight": W, "scale": SCALE}, "weight is float32; float8_e4m3fn", id="scale-of-floats"),
        pytest.param({"weight": CODES, "scale": SCALE.float()}, "weight_scale is float32", id="float-scale"),
        pytest.param(
            {"weight": CODES, "scale": SCALE.T}, r"weight_scale is .2, 3.; .3, 2. is needed", id="scale-shape"
        ),
        pytest.param({"weight": W, "bias": B[:2]}, r"bias is .2.; .3. is needed", id="bias-shape"),
        pytest.param({"weight": W.to("meta")}, "weight is a meta tensor", id="meta"),
    ],
)
def test_what_no_layer_can_take_is_refused_before_it_is_sent(weights: dict[str, Any], words: str) -> None:
    """Guards: gigabytes sent for an error that was plain beforehand."""
    transport = Recorded(body=RESULT)
    with pytest.raises(InputError, match=words):
        client(transport).refit("a", **weights)
    assert transport.requests == []


def test_the_answer_is_typed() -> None:
    result = client(Recorded(body=RESULT)).refit("a", W)
    assert result == gemmwire.Refitted("a", "4", "3", 0.03, 0.001, {"read": 0.1, "exchange": 0.2})


@pytest.mark.parametrize("version", [3, "3"])
def test_the_version_that_is_to_be_replaced_is_sent(version: Any) -> None:
    _, request = sent(weight=W, if_version=version)
    assert request.headers["if-match"] == "3"
    assert "if-match" not in sent(weight=W)[1].headers


@pytest.mark.parametrize("version", ["", "v3", -1, True, "1\r\nx: y", 1.5], ids=repr)
def test_what_is_no_version_is_refused(version: Any) -> None:
    with pytest.raises(InvalidArgument, match="if_version"):
        client(Recorded(body=RESULT)).refit("a", W, if_version=version)


def test_another_version_is_a_conflict() -> None:
    body = {"error": "Layer 'a' is in version 5, not 3", "code": "version_conflict", "expected": 5, "got": 3}
    with pytest.raises(Conflict, match="in version 5") as caught:
        client(Recorded(409, body)).refit("a", W, if_version=3)
    assert (caught.value.code, caught.value.expected) == ("version_conflict", 5)


def test_a_refit_is_sent_once() -> None:
    """Guards: a repeat after a connection that ended, when the server had replaced the weight already."""

    def script(session: Session, served: Served) -> None:
        request = session.request()
        assert request is not None
        served.requests.append(request)
        if request.method == "GET":
            session.send(answer(json.dumps({"name": "s", "version": "1"}).encode()))
            session.request()

    with serve(script) as served, Client(served.url, max_connections=1) as connected:
        connected.server()  # a connection that a refit could be sent over, and then again over another
        with pytest.raises(TransportError):
            connected.refit("a", W)
    assert [request.method for request in served.requests] == ["GET", "PUT"]


class Refitting(Recorded):
    """Replaces every layer but those in `failing`."""

    def __init__(self, failing: Mapping[str, int] = {}) -> None:
        super().__init__()
        self._failing = failing

    def send(self, request: Request, timeout: float | None) -> Reply:
        super().send(request, timeout)
        name = request.path.split("/")[-2]
        status = self._failing.get(name, 200)
        body = RESULT | {"name": name} if status == 200 else {"error": f"{name} is refused"}
        return Reply(status, {}, bytearray(json.dumps(body).encode()))


def test_many_layers_are_refitted_in_order() -> None:
    transport = Refitting()
    results = client(transport).refit(
        {"a": W, "b": {"weight": W, "bias": B}, "c": {"weight": W, "bias": None}}
    )
    assert [(name, result.name) for name, result in results.items()] == [("a", "a"), ("b", "b"), ("c", "c")]
    assert [sorted(load(b"".join(request.body))) for request in transport.requests] == [
        ["weight"],
        ["bias", "weight"],
        ["weight"],
    ]


def test_a_wrong_weight_among_many_stops_all_of_them() -> None:
    """Guards: half a model replaced because the last tensor had another dtype."""
    transport = Refitting()
    with pytest.raises(InputError, match="Layer 'b': weight is float64"):
        client(transport).refit({"a": W, "b": W.double()})
    with pytest.raises(InvalidArgument, match=r"Layer 'b': there are \['weight', 'biass'\]"):
        client(transport).refit({"a": W, "b": {"weight": W, "biass": B}})
    assert transport.requests == []


def test_a_failure_among_many_says_what_was_done() -> None:
    """Guards: a training loop that cannot tell which layers answer with new weights."""
    transport = Refitting({"b": 400})
    with pytest.raises(RefitIncomplete, match="1 of 3 layers have their new weights; 'b' failed") as caught:
        client(transport).refit({"a": W, "b": W, "c": W})
    assert (caught.value.layer, list(caught.value.done)) == ("b", ["a"])
    assert isinstance(caught.value.__cause__, gemmwire.BadRequest)
    assert len(transport.requests) == 2


def test_what_belongs_to_one_layer_is_refused_beside_many() -> None:
    anything: Any = client(Refitting())
    with pytest.raises(InvalidArgument, match="belong to no layer"):
        anything.refit({"a": W}, if_version=3)
