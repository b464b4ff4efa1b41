"""What holds for any message, and for anything that is none."""

from __future__ import annotations

import json
from contextlib import suppress
from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gemmwire import wire
from gemmwire.wire import InferRequest, InferResponse, Limits, RequestedOutput, Shared, Tensor

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PARAMETERS = st.dictionaries(
    NAMES.filter(lambda name: not name.startswith(("binary_data", "shared_memory"))),
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    max_size=3,
)


PLACES = st.builds(Shared, NAMES.filter(len), st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1))


@st.composite
def tensors(draw: st.DrawFn, names: st.SearchStrategy[str], datatypes: st.SearchStrategy[str]) -> Tensor:
    datatype = draw(datatypes)
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    size = prod(shape) * wire.ITEMSIZE[datatype]
    if draw(st.booleans()):
        return Tensor(draw(names), datatype, shape, b"", draw(PLACES)._replace(nbytes=size))
    return Tensor(draw(names), datatype, shape, draw(st.binary(min_size=size, max_size=size)))


def distinct(datatypes: list[str]) -> st.SearchStrategy[tuple[Tensor, ...]]:
    lists = st.lists(
        tensors(NAMES, st.sampled_from(datatypes)), max_size=4, unique_by=lambda tensor: tensor.name
    )
    return lists.map(tuple)


OUTPUTS = st.lists(
    st.builds(RequestedOutput, NAMES, st.none() | st.booleans(), st.none() | NAMES)
    | st.builds(RequestedOutput, NAMES, st.just(False), st.none() | NAMES, PLACES),
    max_size=3,
    unique_by=lambda output: output.name,
).map(tuple)
WHOLE = [name for name in wire.ITEMSIZE if "INT" in name]


def requests(datatypes: list[str]) -> st.SearchStrategy[InferRequest]:
    return st.builds(
        InferRequest,
        inputs=distinct(datatypes),
        outputs=st.none() | OUTPUTS,
        binary_outputs=st.booleans(),
        id=NAMES,
        parameters=PARAMETERS,
    )


def responses(datatypes: list[str]) -> st.SearchStrategy[InferResponse]:
    return st.builds(
        InferResponse,
        model_name=NAMES,
        model_version=NAMES,
        outputs=distinct(datatypes),
        id=NAMES,
        parameters=PARAMETERS,
    )


def received(headers: dict[str, str], buffers: list[wire.Buffer]) -> tuple[bytearray, int | None]:
    """What the other end gets: one body, and the header's value."""
    body = bytearray(b"".join(buffers))
    return body, wire.header_length(headers.get(wire.HEADER_LENGTH), len(body))


@given(requests(list(wire.ITEMSIZE)))
def test_any_request_survives_the_binary_route(request: InferRequest) -> None:
    """Guards: a field, a byte or a dimension lost on the way."""
    assert wire.decode_request(*received(*wire.encode_request(request))) == request


@given(requests(WHOLE))
def test_any_request_survives_the_json_route(request: InferRequest) -> None:
    """Guards: the same; floats, whose NaNs all read "NaN", have a test of every bit pattern of their own."""
    assert wire.decode_request(*received(*wire.encode_request(request, binary=False))) == request


@given(responses(WHOLE), st.data())
def test_any_response_survives_a_mix_of_routes(response: InferResponse, data: st.DataObject) -> None:
    """Guards: raw tensors that go to the wrong outputs where others travel as JSON."""
    count = len(response.outputs)
    binary = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    assert wire.decode_response(*received(*wire.encode_response(response, binary))) == response


KEYS = st.sampled_from(
    [
        "inputs",
        "outputs",
        "name",
        "datatype",
        "shape",
        "data",
        "parameters",
        "binary_data_size",
        "id",
        "model_name",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=20,
)

WHOLE_MESSAGE = (
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"BF16","parameters":{"binary_data_size":12}}],'
    b'"id":"r-1","parameters":{"timeout":5},'
    b'"outputs":[{"name":"y","parameters":{"binary_data":true,"datatype":"FP32"}}]}'
).ljust(256) + bytes(12)


def only_wire_errors(body: bytes, length: int | None) -> None:
    for decode in (wire.decode_request, wire.decode_response):
        with suppress(wire.WireError):
            decode(bytearray(body), length, Limits(json_bytes=500))


@given(st.binary(max_size=300), st.none() | st.integers(0, 300))
def test_arbitrary_bytes_are_refused_and_nothing_worse(body: bytes, length: int | None) -> None:
    """Guards: a foreign exception, which the server could answer with 500 only."""
    only_wire_errors(body, None if length is None else min(length, len(body)))


@given(JSON, st.binary(max_size=20), st.booleans())
def test_arbitrary_json_is_refused_and_nothing_worse(document: Any, tail: bytes, framed: bool) -> None:
    """Guards: the same, behind the parser."""
    head = json.dumps(document).encode()
    only_wire_errors(head + tail, len(head) if framed else None)


def near(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return right | right | right | JSON


NUMBERS = st.integers() | st.floats() | st.sampled_from(["NaN", "Infinity", "-Infinity", "1", True, None])
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "name": near(NAMES),
        "datatype": near(st.sampled_from(list(wire.ITEMSIZE))),
        "shape": near(st.lists(st.integers(-1, 3), max_size=3)),
        "data": near(st.lists(NUMBERS | st.lists(NUMBERS, max_size=3), max_size=4)),
        "parameters": near(st.fixed_dictionaries({"binary_data_size": near(st.integers(-1, 20))})),
    },
)
DOCUMENTS = st.fixed_dictionaries(
    {"inputs": near(st.lists(ITEMS, max_size=2)), "outputs": near(st.lists(ITEMS, max_size=2))},
    optional={"id": near(NAMES), "model_name": near(NAMES), "parameters": near(PARAMETERS)},
)


@given(DOCUMENTS, st.binary(max_size=20), st.booleans())
def test_an_almost_right_document_is_refused_and_nothing_worse(
    document: Any, tail: bytes, framed: bool
) -> None:
    """Guards: the same, where one field of an otherwise right message is of another type or size."""
    head = json.dumps(document).encode()
    only_wire_errors(head + tail, len(head) if framed else None)


@given(st.integers(0, 255), st.integers(0, 267), st.binary(max_size=3))
def test_a_damaged_message_is_refused_and_nothing_worse(at: int, end: int, patch: bytes) -> None:
    """Guards: the same, a few bytes away from a message that is right."""
    body = WHOLE_MESSAGE
    only_wire_errors(body[:at] + patch + body[at + len(patch) :], 256)
    only_wire_errors(body[:end], min(256, end))
