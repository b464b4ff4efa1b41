"""Bad input: a sentence, a code and the two sides; and the server goes on."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from http_calls import HEADER_LENGTH, call, infer, json_message, message
from serving import Served, serving, settings

X = torch.ones(2, 128)
BODY, LENGTH = message(X)


def tensor(**changes: Any) -> dict[str, Any]:
    fields = {"name": "x", "shape": [1, 128], "datatype": "FP32", "data": [1.0] * 128} | changes
    return {key: value for key, value in fields.items() if value is not None}


def document(*inputs: dict[str, Any], **extra: Any) -> bytes:
    return json.dumps({"inputs": list(inputs)} | extra).encode()


CASES: dict[str, tuple[bytes, int | None, int, str]] = {
    # name: body, header length, status, code
    "wrong-k": (document(tensor(shape=[1, 64], data=[1.0] * 64)), None, 400, "k_mismatch"),
    "wrong-k-binary": (*message(torch.ones(2, 127)), 400, "k_mismatch"),
    "wrong-dtype-fp64": (document(tensor(datatype="FP64")), None, 400, "dtype_unsupported"),
    "wrong-dtype-int8": (document(tensor(datatype="INT8", data=[1] * 128)), None, 400, "dtype_unsupported"),
    "dtype-of-no-protocol": (document(tensor(datatype="FP8")), None, 400, "dtype_unsupported"),
    "dtype-bytes": (document(tensor(datatype="BYTES")), None, 400, "dtype_unsupported"),
    "rank-0": (document(tensor(shape=[], data=[1.0])), None, 400, "rank_unsupported"),
    "no-input": (document(), None, 400, "input_missing"),
    "other-input": (document(tensor(name="input")), None, 400, "input_missing"),
    "extra-input": (document(tensor(), tensor(name="z")), None, 400, "input_unexpected"),
    "same-input-twice": (document(tensor(), tensor()), None, 400, "request_invalid"),
    "other-output": (document(tensor(), outputs=[{"name": "z"}]), None, 400, "output_unknown"),
    "output-dtype": (
        document(tensor(), outputs=[{"name": "y", "parameters": {"datatype": "INT8"}}]),
        None,
        400,
        "dtype_unsupported",
    ),
    "data-shorter-than-shape": (document(tensor(data=[1.0] * 127)), None, 400, "shape_invalid"),
    "data-longer-than-shape": (document(tensor(data=[1.0] * 129)), None, 400, "shape_invalid"),
    "negative-shape": (document(tensor(shape=[-1, 128])), None, 400, "shape_invalid"),
    "shape-2^63": (document(tensor(shape=[1 << 63, 128])), None, 400, "shape_invalid"),
    "shape-overflowing": (document(tensor(shape=[1 << 62, 128])), None, 400, "shape_invalid"),
    "shape-of-floats": (document(tensor(shape=[1.0, 128])), None, 400, "shape_invalid"),
    "no-data": (document(tensor(data=None)), None, 400, "request_invalid"),
    "value-text": (document(tensor(data=["1.5"] * 128)), None, 400, "value_invalid"),
    "value-bool": (document(tensor(data=[True] * 128)), None, 400, "value_invalid"),
    "value-null": (document(tensor(data=[None] * 128)), None, 400, "value_invalid"),
    "value-beyond-fp32": (document(tensor(data=[1e39] * 128)), None, 400, "value_invalid"),
    "value-beyond-fp16": (
        document(tensor(datatype="FP16", data=[65520.0] * 128)),
        None,
        400,
        "value_invalid",
    ),
    "nan-literal": (json_message(X).replace(b"1.0", b"NaN", 1), None, 400, "json_invalid"),
    "not-json": (b"not json", None, 400, "json_invalid"),
    "not-utf8": (b'{"inputs": "\xff"}', None, 400, "json_invalid"),
    "empty": (b"", None, 400, "json_invalid"),
    "json-array": (b"[]", None, 400, "json_invalid"),
    "json-deep": (b"[" * 100_000, None, 400, "json_invalid"),
    "json-key-twice": (b'{"inputs": [], "inputs": []}', None, 400, "json_invalid"),
    "inputs-object": (b'{"inputs": {}}', None, 400, "request_invalid"),
    "truncated": (BODY[:-1], LENGTH, 400, "frame_invalid"),
    "padded": (BODY + b"\0", LENGTH, 400, "frame_invalid"),
    "header-length-beyond-body": (BODY, len(BODY) + 1, 400, "frame_invalid"),
    "header-length-2^40": (BODY, 1 << 40, 400, "frame_invalid"),
    "header-length-inside-json": (BODY, LENGTH - 10, 400, "json_invalid"),
    "raw-not-whole-rows": (b"\0" * 255, 0, 400, "frame_invalid"),
    "sequence": (document(tensor(), parameters={"sequence_id": 3}), None, 400, "sequence_unsupported"),
    "timeout-text": (document(tensor(), parameters={"timeout": "1"}), None, 400, "request_invalid"),
    "timeout-negative": (document(tensor(), parameters={"timeout": -1}), None, 400, "request_invalid"),
    "timeout-10^18": (document(tensor(), parameters={"timeout": 10**18}), None, 400, "request_invalid"),
    "timeout-10^400": (document(tensor(), parameters={"timeout": 10**400}), None, 400, "request_invalid"),
    "timeout-true": (document(tensor(), parameters={"timeout": True}), None, 400, "request_invalid"),
    "shared-memory": (
        document(tensor(data=None, parameters={"shared_memory_region": "r", "shared_memory_byte_size": 512})),
        None,
        400,
        "shared_memory_unsupported",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_request_is_explained_and_the_server_goes_on(
    server: Served, case: tuple[bytes, int | None, int, str]
) -> None:
    body, length, status, code = case
    reply = infer(server, "m.plain", body, length)
    problem = reply.json
    assert (reply.status, problem["code"]) == (status, code), problem
    assert set(problem) == {"error", "code", "expected", "got", "request_id"}
    assert len(problem["error"]) > 20
    assert infer(server, "m.plain", BODY, LENGTH).status == 200


@pytest.mark.parametrize("value", ["-1", "1.5", "x", "", "1e3", "99999999999999999999999"])
def test_a_header_length_that_is_no_number(server: Served, value: str) -> None:
    reply = call(server, "POST", "/v2/models/m.plain/infer", BODY, {HEADER_LENGTH: value})
    assert (reply.status, reply.json["code"]) == (400, "frame_invalid")


def test_a_header_that_says_how_to_read_the_body_may_come_once(server: Served) -> None:
    head = (
        "POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\n"
        f"{HEADER_LENGTH}: 3\r\n{HEADER_LENGTH}: {LENGTH}\r\n"
        f"Content-Length: {len(BODY)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as link:
        link.sendall(head.encode() + BODY)
        reply = link.recv(65536)
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"came 2 times" in reply


def test_a_body_that_holds_no_tensors_has_a_small_limit(server: Served) -> None:
    reply = call(server, "POST", "/v2/repository/index", b" " * 100_000)
    assert (reply.status, reply.json["code"]) == (413, "body_too_large")


def test_both_sides_are_named(server: Served) -> None:
    problem = infer(server, "m.plain", *message(torch.ones(2, 127))).json
    assert (problem["expected"], problem["got"]) == (128, 127)
    assert "128" in problem["error"]
    assert "127" in problem["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v2/models/nowhere/infer", 404, "layer_unknown"),
        ("POST", "/v2/models/m.plain%2Fx/infer", 404, "route_unknown"),
        ("GET", "/v2/models/nowhere", 404, "layer_unknown"),
        ("GET", "/v2/models/nowhere/config", 404, "layer_unknown"),
        ("GET", "/v2/models/m.plain/versions/9", 404, "version_unknown"),
        ("GET", "/v3", 404, "route_unknown"),
        ("DELETE", "/v2/models/m.plain", 405, "method_not_allowed"),
        ("GET", "/v2/models/m.plain/infer", 405, "method_not_allowed"),
        ("POST", "/v2/repository/index", 400, "request_invalid"),
    ],
)
def test_routes_that_are_not_there(server: Served, method: str, path: str, status: int, code: str) -> None:
    body = b"[1" if method == "POST" else None
    reply = call(server, method, path, body, {"Content-Type": "application/json"})
    assert (reply.status, reply.json["code"]) == (status, code), reply.body


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def narrow(checkpoint: object, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with small limits."""
    options = settings(
        model=(f"m={checkpoint}",),
        random_layer=("tall=4096x1",),
        max_body_bytes=8192,
        max_json_bytes=2048,
        fast_path=request.param,
    )
    with serving(options) as served:
        yield served


def test_a_declared_body_above_the_limit_is_refused_before_it_is_sent(narrow: Served) -> None:
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=10) as link:
        link.sendall(
            b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n\r\n"
        )
        reply = link.recv(65536)  # not one byte of the body has been sent
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in reply


def test_a_chunked_body_is_cut_off_at_the_limit(narrow: Served) -> None:
    pieces = (b"\0" * 1024 for _ in range(16))
    reply = call(narrow, "POST", "/v2/models/m.plain/infer", pieces)
    assert (reply.status, reply.json["code"]) == (413, "body_too_large")


def test_an_unknown_layer_is_refused_before_its_body_is_sent(narrow: Served) -> None:
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=10) as link:
        link.sendall(b"POST /v2/models/nowhere/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n")
        assert link.recv(65536).startswith(b"HTTP/1.1 404")


def test_json_has_its_own_limit(narrow: Served) -> None:
    reply = infer(narrow, "m.plain", json_message(torch.full((2, 128), 0.123456)))
    assert (reply.status, reply.json["code"]) == (413, "json_too_large")
    assert "binary" in reply.json["error"]


def test_an_answer_larger_than_the_limit_is_refused_before_it_is_computed(narrow: Served) -> None:
    executions = narrow.engine.layers["tall"].stats.executions
    reply = infer(narrow, "tall", *message(torch.ones(1, 1)))
    assert (reply.status, reply.json["code"]) == (413, "answer_too_large")
    assert infer(narrow, "m.plain", *message(torch.ones(2, 128), parameters={})).status == 200
    long = infer(narrow, "m.plain", *message(torch.ones(8, 128), parameters={}))  # 512 numbers as JSON
    assert (long.status, long.json["code"]) == (413, "json_too_large")
    assert infer(narrow, "m.plain", *message(torch.ones(8, 128))).status == 200
    assert narrow.engine.layers["tall"].stats.executions == executions


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("br", BODY, 415, "encoding_unsupported"),
        ("gzip", BODY, 400, "encoding_invalid"),
        ("gzip", gzip.compress(BODY)[:-4], 400, "encoding_invalid"),
        ("gzip", gzip.compress(BODY) + b"more", 400, "encoding_invalid"),
        ("gzip", gzip.compress(b"\0" * 1_000_000), 413, "body_too_large"),
        ("deflate", zlib.compress(b"\0" * 1_000_000), 413, "body_too_large"),
    ],
    ids=["unknown", "not-gzip", "truncated", "trailing", "gzip-bomb", "deflate-bomb"],
)
def test_encodings_that_cannot_be_decoded(
    narrow: Served, encoding: str, body: bytes, status: int, code: str
) -> None:
    assert len(body) < 4096, "the packed body itself must be within the limit"
    reply = infer(narrow, "m.plain", body, LENGTH, Content_Encoding=encoding)
    assert (reply.status, reply.json["code"]) == (status, code), reply.body
