"""The client itself, and the calls beside infer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import gemmwire
from gemmwire import AsyncClient, Client, InvalidArgument, WireError
from scripted_layer import Recorded, X, client, layer
from scripted_server import Received, serve


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"url": "h:8000"}, "must start with http", id="url"),
        pytest.param({"timeout": 0}, "timeout is 0", id="timeout"),
        pytest.param({"max_connections": 0}, "max_connections is 0", id="no-connections"),
        pytest.param({"max_connections": 1.5}, "max_connections is 1.5", id="connections-float"),
        pytest.param({"headers": {"a b": "c"}}, "Header name 'a b'", id="header-name"),
        pytest.param({"headers": {"": "c"}}, "Header name ''", id="header-name-empty"),
        pytest.param(
            {"headers": {"a": "b\r\nc: d"}}, "value of header 'a' must be printable", id="line-break"
        ),
        pytest.param({"headers": {"a": "\u20ac"}}, "value of header 'a' must be printable", id="not-latin-1"),
        pytest.param({"headers": {"a": 1}}, "value of header 'a' must be printable", id="header-number"),
        pytest.param({"api_key": ""}, "api_key must be visible", id="empty-key"),
        pytest.param({"api_key": "a b"}, "api_key must be visible", id="key-with-a-space"),
        pytest.param(
            {"api_key": "k", "headers": {"AUTHORIZATION": "x"}}, "leave one of them out", id="two-keys"
        ),
        pytest.param({"headers": {"Content-Length": "1"}}, "belongs to the message", id="content-length"),
        pytest.param(
            {"headers": {"TRANSFER-ENCODING": "x"}}, "belongs to the message", id="transfer-encoding"
        ),
    ],
)
def test_a_client_that_cannot_work_is_not_made(arguments: dict[str, Any], words: str) -> None:
    """Guards: a mistake that shows at the first call, or in the middle of somebody else's request."""
    with pytest.raises(InvalidArgument, match=words):
        Client(**arguments)


def test_the_value_of_a_refused_header_is_not_repeated() -> None:
    """Guards: an API key in a traceback."""
    with pytest.raises(InvalidArgument) as caught:
        Client(headers={"authorization": "Bearer secret\n"})
    assert "secret" not in str(caught.value)


def test_the_key_goes_with_every_request_and_into_no_message() -> None:
    """Guards: a key that is sent as it stands in nobody's documentation, or shown in a traceback."""
    transport = Recorded(body=[])
    c = client(transport, api_key="k-123")
    c.layers()
    c.ready()
    assert [request.headers["authorization"] for request in transport.requests] == ["Bearer k-123"] * 2
    assert "k-123" not in repr(c)
    with pytest.raises(InvalidArgument) as caught:
        Client(api_key="secret\n")
    assert "secret" not in str(caught.value)


def test_a_client_shows_its_address_alone() -> None:
    """Guards: headers, with the key among them, in a log."""
    assert repr(Client("http://h:1/p/", headers={"authorization": "k"})) == "Client('http://h:1/p')"


def test_the_default_address_is_the_server_s_default() -> None:
    """Guards: a first try that needs an address."""
    assert repr(Client()) == "Client('http://127.0.0.1:8000')"


def test_a_call_after_close_is_refused() -> None:
    """Guards: a `with` block whose client goes on to open connections."""
    with serve(layer) as served:
        with Client(served.url) as c:
            c.infer("a", X)
        with pytest.raises(gemmwire.ConnectionFailed, match="has been closed"):
            c.infer("a", X)


def test_the_request_arrives_as_it_was_made() -> None:
    """Guards: headers that the transport adds, drops or repeats."""
    with serve(layer) as served, Client(served.url + "/p", headers={"X-Key": "\u00fc"}) as c:
        c.infer("a", X)
    request: Received = served.requests[0]
    assert request.path == "/p/v2/models/a/infer"
    assert request.headers["host"] == f"127.0.0.1:{served.port}"
    assert request.headers["x-key"] == "\u00fc"
    assert int(request.headers["content-length"]) == len(request.body)


def test_layers_are_read_from_the_index() -> None:
    """Guards: an index of another form than the server's."""
    entry = {
        "name": "a",
        "version": "1",
        "state": "READY",
        "reason": "",
        "n": 3,
        "k": 4,
        "backend": "emulation",
    }
    failed = {"name": "b", "version": "2", "state": "UNAVAILABLE", "reason": "out of memory", "n": 1, "k": 2}
    transport = Recorded(body=[entry, failed])
    layers = client(transport).layers()

    assert layers == [
        gemmwire.LayerInfo("a", 3, 4, "1", "READY", "emulation"),
        gemmwire.LayerInfo("b", 1, 2, "2", "UNAVAILABLE", "", reason="out of memory"),
    ]
    (request,) = transport.requests
    assert (request.method, request.path, request.body) == ("POST", "/p/v2/repository/index", [b"{}"])
    assert request.headers["content-type"] == "application/json"


def test_a_layer_is_read_from_its_config() -> None:
    """Guards: facts about a layer that can be seen in the server's log only."""
    config = {
        "name": "a",
        "n": 3,
        "k": 4,
        "bias": True,
        "version": "1",
        "backend": "emulation",
        "buckets": [1, 8],
    }
    transport = Recorded(body={**config, "passed_over": []})
    info = client(transport).layer("a/b")

    assert info == gemmwire.LayerInfo("a", 3, 4, "1", "READY", "emulation", bias=True)
    assert info.config == {"buckets": [1, 8], "passed_over": []}
    assert (transport.requests[0].method, transport.requests[0].path) == ("GET", "/p/v2/models/a%2Fb/config")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        pytest.param(
            {"name": "a"}, "layer 'a' has no 'n'; is this a gemmwire server", id="of-another-server"
        ),
        pytest.param({"name": "a", "n": "3"}, "'n' of layer 'a' is '3'", id="text-for-a-number"),
        pytest.param([], "not a JSON object", id="array"),
    ],
)
def test_a_config_that_is_no_layer_s_is_refused(document: object, words: str) -> None:
    """Guards: a KeyError for an answer of some other server."""
    with pytest.raises(WireError, match=words):
        client(Recorded(body=document)).layer("a")


def test_server_and_statistics() -> None:
    """Guards: metadata in another form than the protocol's."""
    transport = Recorded(body={"name": "gemmwire", "version": "0.1.0", "extensions": ["statistics"]})
    assert client(transport).server() == gemmwire.ServerInfo("gemmwire", "0.1.0", ("statistics",))
    assert transport.requests[0].path == "/p/v2"

    transport = Recorded(body={"model_stats": [{"name": "a", "inference_count": 5}]})
    assert client(transport).stats("a") == {"name": "a", "inference_count": 5}
    assert transport.requests[0].path == "/p/v2/models/a/stats"


@pytest.mark.parametrize(
    ("status", "healthy"), [(200, True), (204, True), (503, False), (500, False), (400, False)]
)
def test_health_is_a_status(status: int, healthy: bool) -> None:
    """Guards: an exception as the answer to a question with yes and no."""
    transport = Recorded(status)
    assert client(transport).ready() is healthy
    assert client(transport).live() is healthy
    assert [request.path for request in transport.requests] == ["/p/v2/health/ready", "/p/v2/health/live"]


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_a_status_that_says_nothing_about_health_is_raised(status: int) -> None:
    """Guards: a wrong address that looks like a server that is not ready yet, for ever."""
    with pytest.raises(gemmwire.ServerError):
        client(Recorded(status)).ready()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_client_is_not_copied(kind: type[Client | AsyncClient], copied: Callable[[object], object]) -> None:
    """Guards: connections shared with a copy, and a key in a pickle, which is made as a copy is."""
    with pytest.raises(TypeError, match="make one in each process") as caught:
        copied(kind("http://h", api_key="secret"))
    assert "secret" not in str(caught.value)
