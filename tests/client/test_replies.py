"""Replies that are errors, and replies that are no answer to what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gemmwire
from gemmwire import Client, LayerInfo, WireError
from gemmwire.replies import columns_of
from scripted_layer import Recorded, X, client
from scripted_server import Served, Session, answer, serve

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "no-y": ({"outputs": []}, "no output 'y'"),
    "other-dtype": ({"datatype": "FP16", "data": [0] * 6}, "y is FP16, but FP32 was asked for"),
    "other-rows": ({"shape": [3, 2], "data": [0] * 6}, r"y has shape \[3, 2\], but x had shape \[2, 4\]"),
    "other-rank": ({"shape": [6], "data": [0] * 6}, r"y has shape \[6\]"),
    "other-id": ({"id": "r-2"}, "the answer to request 'r-1' is marked 'r-2'"),
    "no-id": ({"id": ""}, "the answer to request 'r-1' is marked ''"),
    "bucket-text": ({"parameters": {"bucket": "8"}}, "'bucket' of the answer is '8'"),
    "bucket-bool": ({"parameters": {"bucket": True}}, "'bucket' of the answer is True"),
}


@pytest.mark.parametrize(("changes", "words"), MISFITS.values(), ids=MISFITS.keys())
def test_an_answer_that_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    """Guards: the answer to another request, or of another server, taken for y."""
    y = {"name": "y", "shape": [2, 3], "datatype": "FP32", "data": [0] * 6}
    y |= {key: value for key, value in changes.items() if key in y}
    document = {"model_name": "a", "model_version": "1", "id": "r-1", "outputs": [y]}
    document |= {key: value for key, value in changes.items() if key not in y}
    with pytest.raises(WireError, match=words) as caught:
        client(Recorded(body=document)).infer("a", X, request_id="r-1")
    assert caught.value.code == "answer_invalid"


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"\xff\xfe"], ids=["empty", "page", "array", "binary"]
)
def test_a_200_that_is_no_answer_is_a_wire_error(body: bytes) -> None:
    """Guards: a captive portal's page that ends in a JSONDecodeError."""
    c = client(Recorded(body=body))
    for call in (lambda: c.infer("a", X), lambda: c.layer("a"), lambda: c.server(), lambda: c.stats("a")):
        with pytest.raises(WireError):
            call()


def every_call(c: Client) -> Iterator[Callable[[], object]]:
    yield lambda: c.infer("a", X)
    yield lambda: c.layers()
    yield lambda: c.layer("a")
    yield lambda: c.stats("a")
    yield lambda: c.server()


def test_an_error_of_the_server_keeps_all_it_says() -> None:
    """Guards: the sentence, the two sides or the way back lost between server and caller."""
    document = {
        "error": "The queue is full",
        "code": "queue_full",
        "expected": 8,
        "got": 9,
        "request_id": "r",
    }
    c = client(Recorded(503, document, {"retry-after": "2"}))
    for call in every_call(c):
        with pytest.raises(gemmwire.Overloaded, match=r"^The queue is full$") as caught:
            call()
        error = caught.value
        facts = (error.status, error.code, error.expected, error.got, error.request_id, error.retry_after)
        assert facts == (503, "queue_full", 8, 9, "r", 2.0)


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        pytest.param(502, b"<h1>Bad\n Gateway</h1>", {}, "HTTP 502: <h1>Bad Gateway</h1>", id="page"),
        pytest.param(500, b"", {}, "HTTP 500, without a word", id="nothing"),
        pytest.param(500, b"[1]", {}, r"HTTP 500: \[1\]", id="array"),
        pytest.param(404, b'{"detail": "no"}', {}, 'HTTP 404: {"detail": "no"}', id="other-json"),
        pytest.param(400, b"[" * 100_000, {}, "HTTP 400: ", id="deep"),
        pytest.param(500, b"\xff\x00", {}, "HTTP 500: ", id="binary"),
        pytest.param(500, {"error": {"a": 1}}, {}, "{'a': 1}", id="error-object"),
        pytest.param(308, b"", {"location": "https://h/"}, "points to 'https://h/'", id="redirect"),
        pytest.param(503, b"", {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, "HTTP 503", id="retry-date"),
        pytest.param(503, b"", {"retry-after": "-1"}, "HTTP 503", id="retry-negative"),
    ],
)
def test_an_error_of_something_else_is_still_one_of_the_tree(
    status: int, body: object, headers: dict[str, str], words: str
) -> None:
    """Guards: a proxy's page, or another server's error, that breaks the client's reading of errors."""
    with pytest.raises(gemmwire.ServerError, match=words) as caught:
        client(Recorded(status, body, headers)).infer("a", X)
    assert caught.value.status == status
    assert caught.value.retry_after is None


def test_a_503_over_a_socket() -> None:
    """Guards: Retry-After that is lost between the wire and the error."""

    def script(session: Session, served: Served) -> None:
        while session.request() is not None:
            session.send(answer(b'{"error": "Full"}', status="503 Service Unavailable", Retry_After="1"))

    with (
        serve(script) as served,
        Client(served.url) as c,
        pytest.raises(gemmwire.Overloaded, match="Full") as caught,
    ):
        c.infer("a", X)
    assert caught.value.retry_after == 1.0


def layer_of(parts: object) -> LayerInfo:
    return LayerInfo(
        "m.qkv",
        n=3,
        k=4,
        version="1",
        state="READY",
        backend="",
        reason="",
        bias=None,
        config={"parts": parts},
    )


def test_the_columns_of_parts_are_read() -> None:
    parts = [{"name": "q", "start": 0, "stop": 2}, {"name": "k", "start": 2, "stop": 3}]
    assert columns_of(layer_of(parts)) == {"q": (0, 2), "k": (2, 3)}
    assert columns_of(layer_of(None)) == {}


@pytest.mark.parametrize(
    "parts", [5, ["q"], [{"name": "q"}], [{"name": "q", "start": "a", "stop": 1}]], ids=str
)
def test_parts_that_are_none_are_refused(parts: object) -> None:
    """Guards: a KeyError of the client's own, where a call raises nothing but its errors."""
    with pytest.raises(WireError, match="the parts of layer") as caught:
        columns_of(layer_of(parts))
    assert caught.value.code == "answer_invalid"
