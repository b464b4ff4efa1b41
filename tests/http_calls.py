"""Requests as bytes over a socket, for the tests of the protocol."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving import Served

HEADER_LENGTH = "Inference-Header-Content-Length"
TORCH = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        length = self.headers.get(HEADER_LENGTH.lower())
        return json.loads(self.body[: int(length)] if length else self.body)

    @property
    def tensor(self) -> Tensor:
        """The first output, which came as binary."""
        output = self.json["outputs"][0]
        data = bytearray(self.body[int(self.headers[HEADER_LENGTH.lower()]) :])
        shape = output["shape"]
        if not data:
            return torch.empty(shape, dtype=TORCH[output["datatype"]])
        return torch.frombuffer(data, dtype=TORCH[output["datatype"]]).view(shape)


def call(
    served: Served,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    try:
        connection.request(method, path, body=body, headers=dict(headers or {}))
        response = connection.getresponse()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, fields, response.read())
    finally:
        connection.close()


def infer(served: Served, layer: str, body: bytes, header_length: int | None = None, **headers: str) -> Reply:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    if header_length is not None:
        fields[HEADER_LENGTH] = str(header_length)
    return call(served, "POST", f"/v2/models/{layer}/infer", body, fields)


def raw(x: Tensor) -> bytes:
    """The tensor's little-endian bytes."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def datatype(x: Tensor) -> str:
    return next(name for name, dtype in TORCH.items() if dtype is x.dtype)


def message(x: Tensor, **extra: Any) -> tuple[bytes, int]:
    """A binary infer request of x -> (body, header length); `extra` are more keys of its JSON part."""
    data = raw(x)
    tensor = {
        "name": "x",
        "shape": list(x.shape),
        "datatype": datatype(x),
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}} | extra).encode()
    return head + data, len(head)


def json_message(x: Tensor, **extra: Any) -> bytes:
    """The same request as JSON numbers."""
    data: list[Any] = x.double().reshape(-1).tolist()
    for index, value in enumerate(data):
        if value != value or value in (float("inf"), float("-inf")):
            data[index] = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    tensor = {"name": "x", "shape": list(x.shape), "datatype": datatype(x), "data": data}
    return json.dumps({"inputs": [tensor]} | extra).encode()
