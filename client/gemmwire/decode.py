"""Bytes -> messages. A tensor is a view of the body; sizes are checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from . import fields
from .jsontensor import from_json
from .messages import (
    ITEMSIZE,
    Buffer,
    InferRequest,
    InferResponse,
    Limits,
    RequestedOutput,
    Tensor,
)

_LIMITS = Limits()


def header_length(value: str | bytes | None, body_bytes: int) -> int | None:
    """The header's value as an int, None where the header is absent. Errors: `frame_invalid`."""
    if value is None:
        return None
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        fields.frame(
            f"Inference-Header-Content-Length is {text[:40]!r}; it must be a decimal number of bytes",
            got=text[:40],
        )
    length = int(text)
    if length > body_bytes:
        fields.frame(
            f"Inference-Header-Content-Length is {length}, but the body has {body_bytes} bytes; "
            "send the length of the JSON part alone",
            expected=f"<= {body_bytes}",
            got=length,
        )
    return length


def decode_request(body: Buffer, length: int | None, limits: Limits = _LIMITS) -> InferRequest:
    """`body`, its first `length` bytes JSON (None: all) -> the request, its tensors views of `body`."""
    head, tail = _open(body, length, limits)
    parameters = fields.parameters(head, "the request")
    binary_outputs = fields.flag(parameters, "binary_data_output", "the request") or False
    parameters.pop("binary_data_output", None)
    inputs = _tensors(head, "input", tail, limits)
    return InferRequest(
        inputs=inputs,
        outputs=_requested_outputs(head, limits),
        binary_outputs=binary_outputs,
        id=fields.text(head, "id", "the request", default=""),
        parameters=parameters,
    )


def decode_raw_request(body: Buffer, name: str, datatype: str, columns: int) -> InferRequest:
    """The raw binary request: no JSON, the body is the rows of one input; all outputs come back binary."""
    row = columns * ITEMSIZE[datatype]
    rows, rest = divmod(len(body), row)
    if rest:
        fields.frame(
            f"A raw binary request holds {datatype} rows of {columns} elements, {row} bytes each, "
            f"but the body has {len(body)} bytes; send whole rows, or a JSON header that states the shape",
            expected=f"a multiple of {row}",
            got=len(body),
        )
    return InferRequest(inputs=(Tensor(name, datatype, (rows, columns), body),), binary_outputs=True)


def decode_response(body: Buffer, length: int | None, limits: Limits = _LIMITS) -> InferResponse:
    """`body`, its first `length` bytes JSON (None: all) -> the answer, its tensors views of `body`."""
    head, tail = _open(body, length, limits)
    outputs = _tensors(head, "output", tail, limits)
    return InferResponse(
        model_name=fields.text(head, "model_name", "the response"),
        model_version=fields.text(head, "model_version", "the response", default=""),
        outputs=outputs,
        id=fields.text(head, "id", "the response", default=""),
        parameters=fields.parameters(head, "the response"),
    )


class _Tail:
    """The raw bytes behind the JSON part, handed out in order."""

    def __init__(self, view: memoryview | None) -> None:
        self._view = view
        self._taken = 0

    def take(self, size: int, where: str) -> memoryview:
        if self._view is None:
            fields.frame(
                f"{where} has binary_data_size, but there is no Inference-Header-Content-Length header; "
                "send the header with the length of the JSON part",
                expected="Inference-Header-Content-Length",
            )
        left = len(self._view) - self._taken
        if size > left:
            fields.frame(
                f"{where} needs {size} bytes of binary data, but only {left} are left in the body",
                expected=size,
                got=left,
            )
        self._taken += size
        return self._view[self._taken - size : self._taken]

    def finish(self) -> None:
        if self._view is not None and self._taken != len(self._view):
            fields.frame(
                f"The tensors take {self._taken} bytes of the {len(self._view)} behind the JSON part; "
                "the sizes must add up to the body exactly",
                expected=self._taken,
                got=len(self._view),
            )


def _bytes(body: Buffer) -> memoryview:
    view = memoryview(body)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _open(body: Buffer, length: int | None, limits: Limits) -> tuple[dict[str, Any], _Tail]:
    view = _bytes(body)
    if length is None:
        return fields.json_object(view, limits.json_bytes), _Tail(None)
    return fields.json_object(view[:length], limits.json_bytes), _Tail(view[length:])


def _tensors(head: Mapping[str, Any], role: str, tail: _Tail, limits: Limits) -> tuple[Tensor, ...]:
    entries = fields.entries(head, f"{role}s", limits.tensors)
    tensors = tuple([_tensor(item, role, tail, limits) for item in entries])
    tail.finish()
    return tensors


def _tensor(item: object, role: str, tail: _Tail, limits: Limits) -> Tensor:
    if not isinstance(item, dict):
        given = fields.kind(item)
        fields.invalid(f"An entry of '{role}s' is {given}; it must be an object", "object", given)
    name = fields.text(item, "name", f"an entry of '{role}s'")
    where = f"{role} {name[:80]!r}"
    datatype = fields.datatype(item, where)
    shape = fields.shape(item, where, limits.rank)
    parameters = fields.parameters(item, where)
    shared = fields.shared(parameters, where)
    key = "binary_data_size" if shared is None else "shared_memory_byte_size"
    size = parameters.get(key)
    if size is None:
        return Tensor(name, datatype, shape, _json_data(item, where, datatype, shape))
    if "data" in item:
        fields.frame(f"{where} has both 'data' and {key}; send one of them")
    wanted = prod(shape) * ITEMSIZE[datatype]
    if type(size) is not int or size != wanted:
        given = fields.quote(size)
        fields.frame(
            f"{where} is {datatype} {list(shape)}, {wanted} bytes, but {key} is {given}",
            expected=wanted,
            got=given,
        )
    return Tensor(name, datatype, shape, b"" if shared is not None else tail.take(size, where), shared)


def _json_data(item: Mapping[str, Any], where: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    data = item.get("data")
    if not isinstance(data, list):
        given = fields.kind(data)
        fields.invalid(
            f"{where} has no data: it needs 'data' (an array of numbers) or parameters.binary_data_size, "
            f"but 'data' is {given}",
            "array",
            given,
        )
    return from_json(data, datatype, shape, where)


def _requested_outputs(head: Mapping[str, Any], limits: Limits) -> tuple[RequestedOutput, ...] | None:
    if head.get("outputs") is None:
        return None
    return tuple([_requested_output(item) for item in fields.entries(head, "outputs", limits.tensors)])


def _requested_output(item: object) -> RequestedOutput:
    if not isinstance(item, dict):
        given = fields.kind(item)
        fields.invalid(f"An entry of 'outputs' is {given}; it must be an object with a name", "object", given)
    name = fields.text(item, "name", "an entry of 'outputs'")
    where = f"output {name[:80]!r}"
    parameters = fields.parameters(item, where)
    shared = fields.shared(parameters, where)
    if parameters.get("classification"):
        fields.invalid(
            f"{where} asks for a classification; a layer gives its y as it is", "no classification", name
        )
    datatype = parameters.get("datatype")
    if datatype is not None and not isinstance(datatype, str):
        given = fields.kind(datatype)
        fields.invalid(f"Parameter 'datatype' of {where} is {given}; it must be a string", "string", given)
    return RequestedOutput(name, fields.flag(parameters, "binary_data", where), datatype, shared)
