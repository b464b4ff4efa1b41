"""Requests: the codec at both ends, the head as the fast path reads it, and what infer makes of a body."""

from __future__ import annotations

import gzip
import json
import zlib
from functools import cache

import torch

from fuzz.target import Target, quoted
from gemmwire import wire
from gemmwire.wire import WireError
from gemmwire_service.backends import Selection
from gemmwire_service.backends.base import LayerSpec, Part, Plan
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer
from gemmwire_service.body import decoded, most_inflated
from gemmwire_service.buckets import Ladder
from gemmwire_service.call import Call
from gemmwire_service.device import Device
from gemmwire_service.engine import Engine, State
from gemmwire_service.errors import EngineError
from gemmwire_service.head import END, parse_head
from gemmwire_service.infer import HEADER_LENGTH, TIMEOUT, Headers, Infer, Limits, error_reply
from gemmwire_service.inputs import QUANTIZED
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.routes import Route, Routes
from gemmwire_service.shm import Regions
from http_calls import json_message, message

N, K = 8, 33
LIMITS = Limits(body_bytes=1 << 16, json_bytes=1 << 14, rows=1 << 10)
WORDS = (
    *quoted("inputs", "outputs", "name", "shape", "datatype", "data", "parameters", "id", "x", "y", "left"),
    *quoted("binary_data_size", "binary_data_output", "binary_data", "classification", "timeout"),
    *quoted("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "sequence_id"),
    *quoted("x_e4m3", "x_scale_e8m0", "NaN", "Infinity", "-Infinity", *wire.ITEMSIZE),
    *(b"1e400", b"9223372036854775808", b"\\ud800", b"true", b"null", b"[[", b"]]", b"{}"),
)


def split(data: bytes) -> tuple[int | None, bytes]:
    """The header length, as decimal digits in front of the first line's end or none, and the body."""
    first, _, body = data.partition(b"\n")
    return (int(first) if first.isdigit() and len(first) < 8 else None), body


def joined(body: bytes, length: int | None = None) -> bytes:
    return (b"" if length is None else str(length).encode()) + b"\n" + body


def decode_request(data: bytes) -> None:
    """Twice, to the same message: nothing of the first is left behind."""
    length, body = split(data)
    if length is not None and length > len(body):
        return
    try:
        first = wire.decode_request(body, length)
    except WireError as error:
        _refused(error)
        return
    again = wire.decode_request(body, length)
    assert again == first
    for tensor in first.inputs:
        if tensor.shared is None:
            assert len(tensor.data) == _elements(tensor.shape) * wire.ITEMSIZE[tensor.datatype]


def _refused(error: WireError | EngineError) -> None:
    assert 400 <= error.status < 500, f"{error.status} {error}"
    str(error).encode()


def decode_response(data: bytes) -> None:
    length, body = split(data)
    if length is not None and length > len(body):
        return
    try:
        wire.decode_response(body, length)
    except WireError as error:
        _refused(error)


def head(data: bytes) -> None:
    """A head is taken whole or left to uvicorn; it never raises."""
    found = parse_head(data + END)
    if found is not None:
        assert found.length >= 0
        assert 0 <= found.offset < 10**9
        assert found.layer
        assert "/" not in found.layer


def infer(data: bytes) -> None:
    """Three lines (header length, timeout, encoding; each may be empty), then a body -> a reply."""
    *lines, body = data.split(b"\n", 3)
    names = (HEADER_LENGTH.lower(), TIMEOUT, b"content-encoding")
    headers = {name: line for name, line in zip(names, lines, strict=False) if line}
    infers, layer = _service()
    try:
        view = memoryview(bytearray(body))
        if b"content-encoding" in headers:
            view = decoded(view, headers[b"content-encoding"], most_inflated(len(body), LIMITS.body_bytes))
        call = infers.call(view, headers, layer)
        _check(call, infers, view, headers, layer)
    except (WireError, EngineError) as error:
        _refused(error)
        json.loads(b"".join(error_reply(error, headers).buffers))


def _check(call: Call, infers: Infer, body: memoryview, headers: Headers, layer: Layer) -> None:
    size = 1 if call.x.datatype == QUANTIZED else wire.ITEMSIZE[call.x.datatype]
    width = K + 2 if call.x.datatype == QUANTIZED else K
    assert len(memoryview(call.x.data).cast("B")) == call.rows * width * size
    assert call.rows <= LIMITS.rows
    again = infers.call(body, headers, layer)  # from what is remembered
    assert again == call
    y = bytes(call.rows * N * wire.ITEMSIZE[call.datatype])
    answer = Answer(y, layer.version, "emulation", 1, 0, 0) if call.rows else None
    reply = infers.reply(call, layer, answer, None)
    assert reply.status == 200
    length = reply.headers.get(wire.HEADER_LENGTH.lower()) or reply.headers.get(wire.HEADER_LENGTH)
    wire.decode_response(b"".join(reply.buffers), int(length) if length else None)


@cache
def _service() -> tuple[Infer, Layer]:
    """An infer whose engine is ready, with no device behind it."""
    backend = Emulation()
    prepared = backend.prepare(MxWeight.from_float(torch.ones(N, K)), torch.device("cpu"))
    routes = Routes(Selection(backend, ()), {1: Route(backend, prepared, Plan(1))}, ())
    spec = LayerSpec("l", N, K, bias=False, parts=(Part("left", 0, 3), Part("right", 3, N)))
    layer = Layer(spec, routes, "test", "F32")
    engine = Engine(
        lambda report: Device(torch.device("cpu"), Ladder.up_to(1), report),
        lambda device: (),
        max_queue=1,
        max_queue_bytes=1 << 20,
    )
    engine.state, engine.layers = State.READY, {"l": layer}
    return Infer(engine, LIMITS, Regions(("system",))), layer


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _seeds() -> dict[str, bytes]:
    x = torch.linspace(-2, 2, 2 * K).view(2, K)
    codes = {"name": "x_e4m3", "shape": [1, K], "datatype": "UINT8", "parameters": {"binary_data_size": K}}
    scales = {"name": "x_scale_e8m0", "shape": [1, 2], "datatype": "UINT8"}
    quantized = json.dumps(
        {"inputs": [codes, {**scales, "parameters": {"binary_data_size": 2}}], "outputs": [{"name": "left"}]}
    ).encode()
    return {
        "binary": joined(*message(x)),
        "bf16": joined(*message(x.bfloat16(), id="a", parameters={"timeout": 7})),
        "json": joined(json_message(x, outputs=[{"name": "y", "parameters": {"binary_data": True}}])),
        "parts": joined(*message(x, outputs=[{"name": "left"}, {"name": "right"}])),
        "quantized": joined(quantized + bytes(K + 2), len(quantized)),
        "raw": joined(bytes(2 * K), 0),
    }


SEEDS = _seeds()
_RESPONSE = wire.encode_response(
    wire.InferResponse("l", "1", (wire.Tensor("y", "FP32", (1, 2), bytes(8)),), "i", {"bucket": 1}), [True]
)
RESPONSES = {
    "binary": joined(b"".join(_RESPONSE[1]), len(_RESPONSE[1][0])),
    "json": joined(
        b'{"model_name":"l","outputs":[{"name":"y","shape":[1],"datatype":"FP32","data":["NaN"]}]}'
    ),
}
HEADS = {
    "plain": b"POST /v2/models/l/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 5",
    "versioned": b"POST /v2/models/l/versions/1/infer HTTP/1.1\r\ncontent-length: 5\r\nConnection: close",
    "binary": b"POST /v2/models/l/infer HTTP/1.1\r\nInference-Header-Content-Length: 3\r\nContent-Length: 5",
}


def _with_lines(seeds: dict[str, bytes]) -> dict[str, bytes]:
    """The seeds of the codec as requests: no timeout and no encoding, and one of each encoding."""
    found = {name: seed.replace(b"\n", b"\n\n\n", 1) for name, seed in seeds.items()}
    length, body = split(seeds["binary"])
    for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        found[encoding] = f"{length}\n5000000\n{encoding}\n".encode() + pack(body)
    return found


REQUESTS = (
    Target("wire_request", decode_request, SEEDS, words=WORDS),
    Target("wire_response", decode_response, RESPONSES, words=(*WORDS, b'"model_name"', b'"model_version"')),
    Target(
        "head",
        head,
        HEADS,
        words=(
            *(
                b"\r\n",
                b"HTTP/1.1",
                b"HTTP/1.0",
                b"Content-Length: ",
                b"Transfer-Encoding: chunked",
                b"infer",
            ),
            *(
                b"Connection: ",
                b"keep-alive",
                b"upgrade",
                b"Upgrade: h2c",
                b"Expect: 100-continue",
                b"Origin: ",
            ),
        ),
    ),
    # A packed body may grow to the limit for bodies, whatever its size.
    Target("infer", infer, _with_lines(SEEDS), words=(*WORDS, b"gzip", b"deflate"), memory=1200),
)
