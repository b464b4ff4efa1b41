"""A layer of three outputs and four inputs, with exact numbers, behind a socket or without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gemmwire import Client, GemmwireError, wire
from gemmwire.http1 import Reply, Request
from scripted_server import Served, Session, answer

W = np.array([[1, 2, 3, 4], [0, 1, 0, -1], [2, 0, 0, 1]], np.float32)
B = np.array([0.5, -1, 0], np.float32)
N, K = W.shape
X = np.array([[1, 2, 3, 4], [0.5, 0, -1, 8]], np.float32)
Y = X @ W.T + B
NUMPY = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


def compute(body: bytes | bytearray, headers: dict[str, str]) -> tuple[dict[str, str], list[wire.Buffer]]:
    """One forward, as the protocol has it: y = x @ W.T + b in the datatype that was asked for."""
    request = wire.decode_request(body, wire.header_length(headers.get(wire.HEADER_LENGTH), len(body)))
    (x,), (output,) = request.inputs, request.outputs or ()
    datatype = output.datatype or x.datatype
    values = np.frombuffer(x.data, NUMPY[x.datatype]).reshape(x.shape).astype(np.float32)
    y = (values @ W.T + B).astype(NUMPY[datatype])
    parameters: dict[str, bool | int | float | str] = {"backend": "test"}
    if y.size:
        parameters |= {"bucket": 8, "queue_us": 3, "device_us": 5}
    tensor = wire.Tensor("y", datatype, y.shape, y.tobytes())
    return wire.encode_response(wire.InferResponse("a", "7", (tensor,), request.id, parameters), [True])


def layer(session: Session, served: Served) -> None:
    """A server of one layer over a socket."""
    while (request := session.request()) is not None:
        served.requests.append(request)
        headers, buffers = compute(request.body, request.headers)
        fields = {name.replace("-", "_"): value for name, value in headers.items()}
        session.send(answer(b"".join(buffers), **fields))


class Recorded:
    """A transport that keeps each request and gives the same reply to all of them."""

    def __init__(self, status: int = 200, body: object = b"", headers: dict[str, str] | None = None) -> None:
        self.reply = Reply(
            status, headers or {}, bytearray(body if isinstance(body, bytes) else json.dumps(body).encode())
        )
        self.requests: list[Request] = []
        self.timeouts: list[float | None] = []

    def send(self, request: Request, timeout: float | None) -> Reply:
        self.requests.append(request)
        self.timeouts.append(timeout)
        return self.reply

    def send_all(
        self, requests: Sequence[Request], timeout: float | None, at_once: int
    ) -> list[Reply | GemmwireError]:
        return [self.send(request, timeout) for request in requests]

    def close(self) -> None:
        pass


class Computing(Recorded):
    """A transport with the layer at its end."""

    def send(self, request: Request, timeout: float | None) -> Reply:
        super().send(request, timeout)
        headers, buffers = compute(b"".join(request.body), dict(request.headers))
        return Reply(200, headers, bytearray(b"".join(buffers)))


def client(transport: Recorded, url: str = "http://h:1/p", **named: Any) -> Client:
    return Client(url, transport=transport, **named)


def sent_json(transport: Recorded) -> Any:
    return json.loads(bytes(transport.requests[-1].body[0]))
