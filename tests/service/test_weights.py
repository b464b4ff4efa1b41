"""PUT .../weights over a socket: what is refused before the body, and what a broken request leaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save

from gemmwire.wire import WireError
from gemmwire_service.engine import State
from gemmwire_service.errors import QueueFull
from gemmwire_service.weights import Room, if_match
from http_calls import Reply, call, infer, message
from oracle import spread
from serving import Served, hold_reading, serving, settings, until

N, K = 64, 96
PATH = "/v2/repository/models/r/weights"
W = spread(N, K)
BODY = save({"weight": W})
X = spread(3, K).to(torch.bfloat16)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """For what changes nothing."""
    with serving(settings(random_layer=(f"r={N}x{K}",), max_weights_bytes=1 << 20)) as running:
        yield running


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(settings(random_layer=(f"r={N}x{K}",))) as running:
        yield running


def put(served: Served, body: bytes = BODY, **headers: str) -> Reply:
    return call(served, "PUT", PATH, body, {name.replace("_", "-"): value for name, value in headers.items()})


def version(served: Served) -> int:
    return served.engine.layers["r"].version


def answer(served: Served) -> tuple[str, bytes]:
    reply = infer(served, "r", *message(X))
    return reply.json["model_version"], reply.tensor.view(torch.int16).numpy().tobytes()


def start(served: Served, head: str, body: bytes) -> bytes:
    """Send what is given and end the request there; -> what was answered."""
    with socket.create_connection(("127.0.0.1", served.port), 30) as sock:
        sock.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(30)
        received = b""
        try:
            while part := sock.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
        return received


def test_a_refit_answers_with_the_version_it_made(served: Served) -> None:
    reply = put(served)
    assert reply.status == 200, reply.body
    assert (reply.json["name"], reply.json["version"], reply.json["previous_version"]) == ("r", "2", "1")
    assert reply.headers["etag"] == '"2"'
    assert sorted(reply.json["seconds"]) == ["exchange", "prepare", "read", "trial"]
    assert answer(served)[0] == "2"


@pytest.mark.parametrize("sent", [0, 1, 7, 8, 100, len(BODY) // 2, len(BODY) - 1])
def test_a_body_that_stops_short_changes_nothing(served: Served, sent: int) -> None:
    """Guards: a weight of what had come; room that a broken request keeps."""
    before = answer(served)
    received = start(served, f"Content-Length: {len(BODY)}\r\n", BODY[:sent])
    assert b" 200 " not in received
    assert answer(served) == before
    assert put(served, BODY[:sent]).status == 400
    assert answer(served) == before
    assert put(served).status == 200


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        pytest.param("Content-Length: 99999999\r\n", 413, "body_too_large", id="beyond-the-setting"),
        pytest.param("Content-Length: 500000\r\n", 413, "body_too_large", id="beyond-the-layer"),
        pytest.param("Transfer-Encoding: chunked\r\n", 411, "length_required", id="chunked"),
        pytest.param(
            "Content-Length: 9\r\nContent-Encoding: gzip\r\n", 415, "encoding_unsupported", id="gzip"
        ),
        pytest.param("Content-Length: 9\r\nIf-Match: 7\r\n", 409, "version_conflict", id="version"),
        pytest.param('Content-Length: 9\r\nIf-Match: W/"1"\r\n', 400, "request_invalid", id="weak-etag"),
        pytest.param('Content-Length: 9\r\nIf-Match: "1", "2"\r\n', 400, "request_invalid", id="two-etags"),
    ],
)
def test_it_is_refused_from_its_head_alone(shared: Served, head: str, status: int, code: str) -> None:
    """Guards: gigabytes read for an answer that was plain beforehand."""
    received = start(shared, head, b"")
    assert received.startswith(f"HTTP/1.1 {status} ".encode()), received
    assert f'"code": "{code}"'.encode() in received
    assert version(shared) == 1


def test_an_unknown_layer_is_named(shared: Served) -> None:
    reply = call(shared, "PUT", "/v2/repository/models/nowhere/weights", BODY)
    assert (reply.status, reply.json["code"]) == (404, "layer_unknown")
    assert call(shared, "POST", PATH, BODY).status == 405


@pytest.mark.parametrize("state", [State.DRAINING, State.LOADING, State.FAILED])
def test_a_server_that_is_not_ready_takes_no_weights(served: Served, state: State) -> None:
    """Guards: a refit that the end of the process cuts off."""
    served.engine.state = state
    try:
        reply = put(served)
    finally:
        served.engine.state = State.READY
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert version(served) == 1


@pytest.mark.parametrize(
    ("header", "wanted"), [(None, None), ("*", None), ("3", 3), ('"3"', 3), (" 12 ", 12)], ids=repr
)
def test_if_match_names_a_version(header: str | None, wanted: int | None) -> None:
    assert if_match(header) == wanted


@pytest.mark.parametrize("header", ["", "x", "-1", "1.5", "9" * 40, "\u0663"], ids=repr)
def test_if_match_of_no_version_is_refused(header: str) -> None:
    with pytest.raises(WireError, match="If-Match is"):
        if_match(header)


def test_refits_of_one_layer_come_one_after_the_other(served: Served) -> None:
    """Guards: two that both replace version 1, of which one is lost without a word."""
    with ThreadPoolExecutor(6) as pool:
        replies = [each.result() for each in [pool.submit(put, served) for _ in range(6)]]
    assert sorted(reply.json["version"] for reply in replies) == ["2", "3", "4", "5", "6", "7"]
    with ThreadPoolExecutor(6) as pool:
        replies = [each.result() for each in [pool.submit(put, served, If_Match="7") for _ in range(6)]]
    assert sorted(reply.status for reply in replies) == [200, 409, 409, 409, 409, 409]
    assert version(served) == 8


def test_weights_that_find_no_room_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the host's memory filled by bodies that wait for their turn."""
    reading, gate = hold_reading(monkeypatch)
    options = settings(random_layer=(f"r={N}x{K}",), max_weights_bytes=len(BODY) + 100)
    with serving(options) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(put, served)
        assert reading.wait(30)
        reply = put(served)
        assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (503, "queue_full", "1")
        assert "--max-weights-bytes" in reply.json["error"]
        gate.set()
        assert first.result().status == 200
        assert put(served).status == 200


def test_room_is_given_back_whatever_happens() -> None:
    room = Room(10)

    def fail() -> None:
        with room.taken(7):
            with pytest.raises(QueueFull), room.taken(4):
                pass
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with room.taken(10):
        pass


def test_a_client_that_leaves_after_its_body_has_its_refit_done(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a refit that is stopped half way because nobody waits for it."""
    reading, gate = hold_reading(monkeypatch)
    with socket.create_connection(("127.0.0.1", served.port), 30) as sock:
        sock.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        assert reading.wait(30)
    gate.set()
    until(lambda: version(served) == 2, "the refit was not done")
    assert answer(served)[0] == "2"


def test_a_body_that_stalls_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a connection that sends nothing more and keeps everybody else's weights out."""
    monkeypatch.setattr("gemmwire_service.weights.STALL_S", 0.05)
    with serving(settings(random_layer=(f"r={N}x{K}",), max_weights_bytes=len(BODY) + 100)) as served:
        with socket.create_connection(("127.0.0.1", served.port), 30) as sock:
            sock.sendall(f"PUT {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
            sock.sendall(BODY[:100])
            sock.settimeout(30)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert put(served).status == 200


def test_openapi_has_the_route_and_its_forms(shared: Served) -> None:
    document = call(shared, "GET", "/openapi.json").json
    route = document["paths"]["/v2/repository/models/{layer}/weights"]["put"]
    assert [each["name"] for each in route["parameters"]] == ["layer", "If-Match"]
    assert "application/octet-stream" in route["requestBody"]["content"]
    schema = route["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert schema == "#/components/schemas/RefitResult"
    assert {"409", "411", "413", "503"} <= set(route["responses"])
