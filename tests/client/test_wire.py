"""Whole messages, byte for byte, and back."""

from __future__ import annotations

import math
import struct

import pytest

from gemmwire import wire
from gemmwire.wire import InferRequest, InferResponse, RequestedOutput, Tensor

X = Tensor("x", "BF16", (2, 3), bytes(range(12)))
Y = Tensor("y", "FP32", (2, 1), struct.pack("<2f", 1.5, math.inf))

REQUEST = InferRequest((X,), (RequestedOutput("y", True, "FP32"),), id="r-1", parameters={"timeout": 5})
RESPONSE = InferResponse("a.b", "3", (Y,), id="r-1", parameters={"backend": "emulation", "bucket": 2})

REQUEST_JSON = (
    b'{"inputs":[{"name":"x","shape":[2,3],"datatype":"BF16","parameters":{"binary_data_size":12}}],'
    b'"id":"r-1","parameters":{"timeout":5},'
    b'"outputs":[{"name":"y","parameters":{"binary_data":true,"datatype":"FP32"}}]}'
)
RESPONSE_JSON = (
    b'{"model_name":"a.b","model_version":"3",'
    b'"outputs":[{"name":"y","shape":[2,1],"datatype":"FP32","parameters":{"binary_data_size":8}}],'
    b'"id":"r-1","parameters":{"backend":"emulation","bucket":2}}'
)


def test_a_binary_request_byte_for_byte() -> None:
    """Guards: a message that only our own decoder reads, and a first tensor at an odd address."""
    headers, buffers = wire.encode_request(REQUEST)

    assert headers == {
        "content-type": "application/octet-stream",
        "inference-header-content-length": "256",
    }
    assert buffers == [REQUEST_JSON.ljust(256), bytes(range(12))]
    assert buffers[1] is X.data
    assert wire.buffers_size(buffers) == 268
    assert wire.decode_request(b"".join(buffers), 256) == REQUEST


def test_a_binary_response_byte_for_byte() -> None:
    """Guards: as above, for the way back."""
    headers, buffers = wire.encode_response(RESPONSE, [True])

    assert headers == {
        "content-type": "application/octet-stream",
        "inference-header-content-length": "192",
    }
    assert buffers == [RESPONSE_JSON.ljust(192), struct.pack("<2f", 1.5, math.inf)]
    assert wire.decode_response(b"".join(buffers), 192) == RESPONSE


def test_a_json_response_byte_for_byte() -> None:
    """Guards: a binary header on an answer without binary data, and Infinity as bare JSON."""
    headers, buffers = wire.encode_response(RESPONSE, [False])

    assert headers == {"content-type": "application/json"}
    assert buffers == [
        RESPONSE_JSON.replace(b'"parameters":{"binary_data_size":8}', b'"data":[1.5,"Infinity"]')
    ]
    assert wire.decode_response(buffers[0], None) == RESPONSE


def test_a_json_request_byte_for_byte() -> None:
    """Guards: an optional field that is sent empty, which other servers refuse."""
    headers, buffers = wire.encode_request(
        InferRequest((Tensor("x", "FP16", (1,), b"\0\x3e"),)), binary=False
    )

    assert headers == {"content-type": "application/json"}
    assert buffers == [b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP16","data":[1.5]}]}']


def test_a_request_of_another_client() -> None:
    """Guards: a decoder that needs our key order, our padding, or our way to ask for binary outputs."""
    head = (
        b'{ "outputs": null, "inputs": [\n {"datatype": "FP32", "data": [[1, 2], [3, 4.5]], "shape": [2, 2],'
        b' "name": "x", "extra": {}} ], "parameters": {"binary_data_output": true, "priority": 1} }\n'
    )
    request = wire.decode_request(bytearray(head), None)

    assert request == InferRequest(
        (Tensor("x", "FP32", (2, 2), struct.pack("<4f", 1, 2, 3, 4.5)),),
        outputs=None,
        binary_outputs=True,
        parameters={"priority": 1},
    )


def test_binary_and_json_inputs_in_one_request() -> None:
    """Guards: tensors of a body that are handed out to the wrong inputs."""
    head = (
        b'{"inputs":[{"name":"a","datatype":"UINT8","shape":[2],"parameters":{"binary_data_size":2}},'
        b'{"name":"b","datatype":"UINT8","shape":[1],"data":[7]},'
        b'{"name":"c","datatype":"UINT8","shape":[0,5],"parameters":{"binary_data_size":0}},'
        b'{"name":"d","datatype":"UINT8","shape":[],"parameters":{"binary_data_size":1}}]}'
    )
    request = wire.decode_request(head + b"\1\2\3", len(head))

    assert [(tensor.name, tensor.shape, bytes(tensor.data)) for tensor in request.inputs] == [
        ("a", (2,), b"\1\2"),
        ("b", (1,), b"\7"),
        ("c", (0, 5), b""),
        ("d", (), b"\3"),
    ]


def test_a_decoded_tensor_is_a_view_of_the_body() -> None:
    """Guards: a copy of every tensor on its way in, and a read-only array out of a writable body."""
    _, buffers = wire.encode_request(REQUEST)
    body = bytearray(b"".join(buffers))
    (x,) = wire.decode_request(body, 256).inputs
    body[256] = 0xFF

    assert isinstance(x.data, memoryview)
    assert x.data[0] == 0xFF
    assert not x.data.readonly


def test_a_raw_request_is_whole_rows() -> None:
    """Guards: a raw body whose last row is cut, taken for a shorter tensor."""
    request = wire.decode_raw_request(bytearray(24), "x", "BF16", 4)
    assert request == InferRequest((Tensor("x", "BF16", (3, 4), bytearray(24)),), binary_outputs=True)

    with pytest.raises(
        wire.WireError, match="rows of 4 elements, 8 bytes each, but the body has 25"
    ) as caught:
        wire.decode_raw_request(bytes(25), "x", "BF16", 4)
    assert (caught.value.code, caught.value.expected, caught.value.got) == (
        "frame_invalid",
        "a multiple of 8",
        25,
    )


def test_an_empty_raw_request_has_no_rows() -> None:
    """Guards: an error, or a row, out of an empty batch."""
    assert wire.decode_raw_request(b"", "x", "BF16", 4).inputs[0].shape == (0, 4)


def test_the_header_is_absent_or_a_length() -> None:
    """Guards: a missing header that is read as length 0, which is another request."""
    assert wire.header_length(None, 10) is None
    assert wire.header_length("0", 10) == 0
    assert wire.header_length(b"10", 10) == 10
