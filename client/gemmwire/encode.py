"""Messages -> buffers: the JSON part and each raw tensor as a buffer of its own, never joined."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from .jsontensor import to_json
from .messages import (
    HEADER_LENGTH,
    ITEMSIZE,
    Buffer,
    InferRequest,
    InferResponse,
    RequestedOutput,
    Shared,
    Tensor,
)

ALIGNMENT = 64

# json.dumps makes an encoder anew for every call that asks for other separators.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode_request(request: InferRequest, *, binary: bool = True) -> tuple[dict[str, str], list[Buffer]]:
    """-> (headers, buffers): the JSON part and each tensor as buffers of their own, never joined."""
    parameters = dict(request.parameters)
    if request.binary_outputs:
        parameters["binary_data_output"] = True
    head: dict[str, Any] = {"inputs": [_tensor_head(tensor, binary) for tensor in request.inputs]}
    if request.id:
        head["id"] = request.id
    if parameters:
        head["parameters"] = parameters
    if request.outputs is not None:
        head["outputs"] = [_output_head(output) for output in request.outputs]
    return _message(head, [tensor for tensor in request.inputs if binary and tensor.shared is None])


def encode_response(response: InferResponse, binary: Sequence[bool]) -> tuple[dict[str, str], list[Buffer]]:
    """-> (headers, buffers); `binary[i]` says whether output i travels as raw bytes or as JSON numbers."""
    head: dict[str, Any] = {
        "model_name": response.model_name,
        "model_version": response.model_version,
        "outputs": [_tensor_head(tensor, raw) for tensor, raw in zip(response.outputs, binary, strict=True)],
    }
    if response.id:
        head["id"] = response.id
    if response.parameters:
        head["parameters"] = dict(response.parameters)
    raw = [tensor for tensor, raw in zip(response.outputs, binary, strict=True) if raw]
    return _message(head, [tensor for tensor in raw if tensor.shared is None])


def buffers_size(buffers: Iterable[Buffer]) -> int:
    """Total bytes of the buffers of one message: its Content-Length."""
    # A list: the sum of a generator takes twice as long for the two or three that there are.
    return sum([len(buffer) if type(buffer) is bytes else memoryview(buffer).nbytes for buffer in buffers])


def _message(head: Mapping[str, Any], tensors: Sequence[Tensor]) -> tuple[dict[str, str], list[Buffer]]:
    text = _ENCODER.encode(head).encode()
    if not tensors:
        return {"content-type": "application/json"}, [text]
    return binary_message(text, [tensor.data for tensor in tensors])


def binary_message(text: bytes, tensors: Sequence[Buffer]) -> tuple[dict[str, str], list[Buffer]]:
    """-> (headers, buffers) of a JSON part and the raw tensors that it describes, in its order."""
    text = aligned(text)
    return {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}, [text, *tensors]


def aligned(text: bytes) -> bytes:
    """A JSON part with spaces behind, by which the first tensor lies aligned in the receiver's buffer."""
    return text + b" " * (-len(text) % ALIGNMENT)


def _tensor_head(tensor: Tensor, binary: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
    if tensor.shared is not None:
        head["parameters"] = _shared(tensor.shared)
    elif binary:
        head["parameters"] = {"binary_data_size": prod(tensor.shape) * ITEMSIZE[tensor.datatype]}
    else:
        head["data"] = to_json(tensor.data, tensor.datatype)
    return head


def _output_head(output: RequestedOutput) -> dict[str, Any]:
    parameters: dict[str, Any] = {} if output.shared is None else _shared(output.shared)
    if output.binary is not None:
        parameters["binary_data"] = output.binary
    if output.datatype is not None:
        parameters["datatype"] = output.datatype
    return {"name": output.name, "parameters": parameters} if parameters else {"name": output.name}


def _shared(place: Shared) -> dict[str, Any]:
    offset = {"shared_memory_offset": place.offset} if place.offset else {}
    return {"shared_memory_region": place.region, "shared_memory_byte_size": place.nbytes, **offset}
