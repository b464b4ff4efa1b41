"""Messages that break the protocol: each is refused by name, with both sides of the mismatch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gemmwire import wire
from gemmwire.wire import Limits, WireError

Message = tuple[bytes, int | None]


def binary(tail: bytes = bytes(4), **changes: Any) -> Message:
    """A binary request of x FP32 [1], right but for `changes` to its input; None drops a key."""
    item: dict[str, Any] = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1],
        "parameters": {"binary_data_size": 4},
    }
    return framed({"inputs": [changed(item, changes)]}, tail)


def plain(**changes: Any) -> Message:
    """The same as JSON."""
    item: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
    return text(json.dumps({"inputs": [changed(item, changes)]}))


def shared(data: Any = None, **changes: Any) -> Message:
    """The same in a region of shared memory."""
    place = changed({"region": "r", "byte_size": 4}, changes)
    parameters = {f"shared_memory_{name}": value for name, value in place.items()}
    return plain(data=data, parameters=parameters)


def request(**fields: Any) -> Message:
    """A right JSON request with `fields` of its own at the top."""
    item = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
    return text(json.dumps({"inputs": [item], **fields}))


def changed(item: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**item, **changes}.items() if value is not None}


def framed(head: object, tail: bytes) -> Message:
    written = json.dumps(head).encode()
    return written + tail, len(written)


def text(head: str | bytes) -> Message:
    return (head if isinstance(head, bytes) else head.encode()), None


def size(value: Any) -> Message:
    return binary(parameters={"binary_data_size": value})


def raw(data: str, datatype: str = "FP32", shape: str = "[1]") -> Message:
    """JSON data as it is written here, which json.dumps might not write."""
    return text(f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}}}]}}')


TWO = [{"name": "x", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}}] * 2
OVERLAPPING = framed({"inputs": [TWO[0], {**TWO[1], "name": "z"}]}, bytes(3))

CASES: dict[str, tuple[Message, str, str]] = {
    # Sizes that do not add up
    "body-truncated": (
        binary(bytes(3)),
        "frame_invalid",
        "needs 4 bytes of binary data, but only 3 are left",
    ),
    "body-padded": (binary(bytes(5)), "frame_invalid", "take 4 bytes of the 5 behind the JSON part"),
    "tensors-overlapping": (
        OVERLAPPING,
        "frame_invalid",
        "Input 'z' needs 2 bytes of binary data, but only 1",
    ),
    "bytes-without-tensor": (framed({"inputs": []}, b"x"), "frame_invalid", "take 0 bytes of the 1"),
    "size-too-small": (size(3), "frame_invalid", "FP32 [1], 4 bytes, but binary_data_size is 3"),
    "size-negative": (size(-4), "frame_invalid", "but binary_data_size is -4"),
    "size-2^63": (size(1 << 63), "frame_invalid", "but binary_data_size is 9223372036854775808"),
    "size-bool": (size(True), "frame_invalid", "but binary_data_size is true"),
    "size-float": (size(4.0), "frame_invalid", "but binary_data_size is 4.0"),
    "size-string": (size("4"), "frame_invalid", 'but binary_data_size is "4"'),
    "size-and-data": (binary(data=[1.5]), "frame_invalid", "both 'data' and binary_data_size"),
    "size-without-header": ((binary()[0][:-4], None), "frame_invalid", "no Inference-Header-Content-Length"),
    "shape-product-overflows": (
        binary(shape=[1 << 62, 4]),
        "frame_invalid",
        "73786976294838206464 bytes, but binary_data_size is 4",
    ),
    # Shapes
    "shape-negative": (binary(shape=[-1]), "shape_invalid", "[-1]; each size must be at least 0"),
    "shape-2^63": (binary(shape=[1 << 63]), "shape_invalid", "below 2^63"),
    "shape-float": (binary(shape=[1.0]), "shape_invalid", "[1.0]; it must be an array of whole numbers"),
    "shape-bool": (binary(shape=[True]), "shape_invalid", "[true]; it must be an array of whole numbers"),
    "shape-string": (binary(shape=["1"]), "shape_invalid", '["1"]'),
    "shape-infinite": (raw("[1]", shape="[1e400]"), "shape_invalid", "must be an array of whole numbers"),
    "shape-number": (binary(shape=1), "shape_invalid", "1; it must be an array"),
    "shape-missing": (binary(shape=None), "shape_invalid", "null; it must be an array"),
    "shape-rank-17": (plain(shape=[1] * 17), "shape_invalid", "has 17 dimensions; at most 16"),
    "data-too-short": (plain(shape=[2]), "shape_invalid", "2 elements, but 'data' holds 1"),
    "data-too-long": (plain(data=[1, 2]), "shape_invalid", "1 elements, but 'data' holds 2"),
    "data-of-2^1000": (plain(shape=[1 << 62] * 16), "shape_invalid", "but 'data' holds 1"),
    "data-ragged": (plain(shape=[2, 2], data=[[1, 2], [3]]), "shape_invalid", "an array of 2"),
    "data-half-nested": (plain(shape=[2, 2], data=[[1, 2], 3, 4]), "shape_invalid", "an array of 2"),
    "data-nested-otherwise": (
        plain(shape=[2, 3], data=[[1, 2], [3, 4], [5, 6]]),
        "shape_invalid",
        "an array of 2",
    ),
    "data-empty-rows": (plain(shape=[2, 0], data=[[], [], []]), "shape_invalid", "an array of 2"),
    # Numbers
    "data-bool": (plain(data=[True]), "value_invalid", "must hold numbers"),
    "data-null": (raw("[null]"), "value_invalid", "must hold numbers"),
    "data-object": (plain(data=[{}]), "value_invalid", "must hold numbers"),
    "data-deeper-than-shape": (plain(data=[[[1]]]), "value_invalid", "must hold numbers"),
    "data-number-as-string": (plain(data=["1.5"]), "value_invalid", "'1.5' is none of the strings"),
    "data-other-spelling": (plain(data=["inf"]), "value_invalid", "'inf' is none of the strings"),
    "data-1e400": (raw("[1e400]"), "value_invalid", "element 0 of 'data' is inf, beyond the range of FP32"),
    "data-1e39-fp32": (raw("[1e39]"), "value_invalid", "1e+39, beyond the range of FP32"),
    "data-65520-fp16": (raw("[65520]", "FP16"), "value_invalid", "65520.0, beyond the range of FP16"),
    "data-3.4e38-bf16": (raw("[3.4e38]", "BF16"), "value_invalid", "3.4e+38, beyond the range of BF16"),
    "data-400-digits": (raw("[" + "9" * 400 + "]"), "value_invalid", "not a number in the range of FP32"),
    "data-5000-digits": (raw("[" + "9" * 5000 + "]"), "json_invalid", "too many digits"),
    "data-float-for-int": (raw("[1.0]", "INT32"), "value_invalid", "must hold whole numbers only"),
    "data-256-uint8": (raw("[256]", "UINT8"), "value_invalid", "beyond the range of UINT8"),
    "data-minus-1-uint64": (raw("[-1]", "UINT64"), "value_invalid", "beyond the range of UINT64"),
    "data-2^63-int64": (raw("[9223372036854775808]", "INT64"), "value_invalid", "beyond the range of INT64"),
    "data-int-for-bool": (raw("[1]", "BOOL"), "value_invalid", "must hold true and false only"),
    # JSON that is none, or that two readers read differently
    "no-body": (text(b""), "json_invalid", "Expecting value: line 1 column 1"),
    "no-json-part": ((b"", 0), "json_invalid", "Expecting value"),
    "not-json": (text("inputs=x"), "json_invalid", "cannot be read"),
    "json-cut": (text('{"inputs":['), "json_invalid", "cannot be read"),
    "two-objects": (text("{}{}"), "json_invalid", "Extra data"),
    "an-array": (text("[]"), "json_invalid", "is an array; it must be an object"),
    "a-number": (text("1"), "json_invalid", "is a number; it must be an object"),
    "key-twice": (text('{"inputs":[],"inputs":[]}'), "json_invalid", "key 'inputs' appears twice"),
    "inner-key-twice": (raw('[1],"data":[2]'), "json_invalid", "key 'data' appears twice"),
    "escaped-key-twice": (text('{"inputs":[],"\\u0069nputs":[]}'), "json_invalid", "appears twice"),
    "NaN-literal": (raw("[NaN]"), "json_invalid", "NaN is not JSON; write non-finite numbers as the strings"),
    "minus-Infinity-literal": (raw("[-Infinity]"), "json_invalid", "-Infinity is not JSON"),
    "nested-100000-deep": (text("[" * 100_000), "json_invalid", "nested too deeply"),
    "data-nested-100000-deep": (raw("[" * 100_000 + "]" * 100_000), "json_invalid", "nested too deeply"),
    "latin-1": (text(b'{"id":"\xe9","inputs":[]}'), "json_invalid", "not UTF-8 at byte 7"),
    "utf-16": (text('{"inputs":[]}'.encode("utf-16")), "json_invalid", "not UTF-8 at byte 0"),
    "utf-8-with-mark": (text(b'\xef\xbb\xbf{"inputs":[]}'), "json_invalid", "cannot be read"),
    "surrogate-in-utf-8": (text(b'{"id":"\xed\xa0\x80","inputs":[]}'), "json_invalid", "not UTF-8"),
    "lone-surrogate-id": (text('{"id":"\\ud800","inputs":[]}'), "json_invalid", "half of a surrogate pair"),
    "lone-surrogate-name": (plain(name="\udfff"), "json_invalid", "half of a surrogate pair"),
    "lone-surrogate-upper-case": (text('{"id":"\\uDC00"}'), "json_invalid", "half of a surrogate pair"),
    # Fields
    "no-inputs": (text("{}"), "request_invalid", "'inputs' is missing or null; it must be an array"),
    "inputs-object": (text('{"inputs":{}}'), "request_invalid", "'inputs' is an object"),
    "input-string": (text('{"inputs":["x"]}'), "request_invalid", "An entry of 'inputs' is a string"),
    "inputs-17": (request(inputs=[{}] * 17), "request_invalid", "has 17 entries; at most 16"),
    "name-missing": (binary(name=None), "request_invalid", "'name' of an entry of 'inputs' is missing"),
    "name-number": (binary(name=1), "request_invalid", "is a number; it must be a string"),
    "name-twice": (framed({"inputs": TWO}, bytes(4)), "request_invalid", 'has the name "x" twice'),
    "datatype-missing": (binary(datatype=None), "request_invalid", "'datatype' of input 'x' is missing"),
    "datatype-lower-case": (
        binary(datatype="fp32"),
        "dtype_unsupported",
        "has datatype 'fp32'; the datatypes are",
    ),
    "datatype-bytes": (binary(datatype="BYTES"), "dtype_unsupported", "BYTES"),
    "data-missing": (plain(data=None), "request_invalid", "has no data: it needs 'data'"),
    "data-string": (plain(data="AAAA"), "request_invalid", "but 'data' is a string"),
    "id-number": (request(id=5), "request_invalid", "'id' of the request is a number"),
    "parameters-array": (
        request(parameters=[]),
        "request_invalid",
        "'parameters' of the request is an array",
    ),
    "parameter-null": (
        request(parameters={"a": None}),
        "request_invalid",
        "Parameter 'a' of the request is missing",
    ),
    "parameter-object": (
        request(parameters={"a": {}}),
        "request_invalid",
        "Parameter 'a' of the request is an obj",
    ),
    "parameter-1e400": (
        text('{"inputs":[],"parameters":{"timeout":1e400}}'),
        "request_invalid",
        "'timeout' of the request is beyond the range of a number",
    ),
    "binary-outputs-number": (
        request(parameters={"binary_data_output": 1}),
        "request_invalid",
        "'binary_data_output' of the request is a number; it must be true or false",
    ),
    "outputs-number": (request(outputs=1), "request_invalid", "'outputs' is a number"),
    "output-string": (request(outputs=["y"]), "request_invalid", "must be an object with a name"),
    "output-twice": (request(outputs=[{"name": "y"}] * 2), "request_invalid", 'the name "y" twice'),
    "output-binary-number": (
        request(outputs=[{"name": "y", "parameters": {"binary_data": 1}}]),
        "request_invalid",
        "'binary_data' of output 'y' is a number",
    ),
    "output-datatype-number": (
        request(outputs=[{"name": "y", "parameters": {"datatype": 1}}]),
        "request_invalid",
        "Parameter 'datatype' of output 'y' is a number",
    ),
    "region-number": (shared(region=1), "request_invalid", "'shared_memory_region' of input 'x' is a number"),
    "region-empty": (shared(region=""), "request_invalid", "must be the name of a region"),
    "region-missing": (shared(region=None), "request_invalid", "is missing or null"),
    "region-size-missing": (shared(byte_size=None), "request_invalid", "byte_size' of input 'x' is null"),
    "region-size-negative": (shared(byte_size=-4), "request_invalid", "is -4; it must be a whole number"),
    "region-size-float": (shared(byte_size=4.0), "request_invalid", "is 4.0; it must be a whole number"),
    "region-size-boolean": (shared(byte_size=True), "request_invalid", "is true; it must be a whole number"),
    "region-size-huge": (shared(byte_size=1 << 63), "request_invalid", "from 0 to 2^63 - 1"),
    "region-size-other": (shared(byte_size=8), "frame_invalid", "4 bytes, but shared_memory_byte_size is 8"),
    "region-offset-negative": (shared(offset=-1), "request_invalid", "is -1; it must be a whole number"),
    "region-offset-float": (shared(offset=0.0), "request_invalid", "is 0.0; it must be a whole number"),
    "region-offset-huge": (shared(offset=1 << 63), "request_invalid", "from 0 to 2^63 - 1"),
    "region-offset-text": (shared(offset="0"), "request_invalid", 'is "0"; it must be a whole number'),
    "region-other": (shared(key="/r"), "request_invalid", "'shared_memory_key', which there is not"),
    "region-and-data": (shared([1.5]), "frame_invalid", "both 'data' and shared_memory_byte_size"),
    "region-and-binary": (
        binary(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4, "binary_data_size": 4}),
        "frame_invalid",
        "both shared_memory_region and binary_data_size",
    ),
    "output-region-and-binary": (
        request(
            outputs=[
                {
                    "name": "y",
                    "parameters": {
                        "shared_memory_region": "r",
                        "shared_memory_byte_size": 4,
                        "binary_data": True,
                    },
                }
            ]
        ),
        "frame_invalid",
        "Output 'y' has both shared_memory_region and binary_data",
    ),
    "output-region-without-size": (
        request(outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]),
        "request_invalid",
        "'shared_memory_byte_size' of output 'y' is null",
    ),
}


@pytest.mark.parametrize(("message", "code", "words"), CASES.values(), ids=CASES.keys())
def test_a_message_that_breaks_the_protocol_is_refused(message: Message, code: str, words: str) -> None:
    """Guards: a tensor of other bytes than were sent, a foreign exception, an error without a way out."""
    body, length = message
    with pytest.raises(WireError) as caught:
        wire.decode_request(bytearray(body), length)
    assert (caught.value.code, caught.value.status) == (code, 400)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 800
    assert not str(caught.value)[0].islower()


@pytest.mark.parametrize("build", [binary, plain, shared, request], ids=lambda build: build.__name__)
def test_the_table_starts_from_messages_that_are_right(build: Callable[[], Message]) -> None:
    """Guards: cases that are refused for another reason than the one they were made for."""
    body, length = build()
    assert wire.decode_request(body, length).inputs[0].shape == (1,)


@pytest.mark.parametrize(
    "value",
    ["", " 1", "1 ", "-1", "+1", "1.0", "0x10", "1_0", "\u0661", "1,1", "9" * 21, b"\xb2", "abc"],
    ids=ascii,
)
def test_a_header_that_is_no_length_is_refused(value: str | bytes) -> None:
    """Guards: what int() takes for a number and other readers of the header do not."""
    with pytest.raises(WireError, match="must be a decimal number of bytes") as caught:
        wire.header_length(value, 100)
    assert caught.value.code == "frame_invalid"


@pytest.mark.parametrize("length", [11, 1 << 40, (1 << 64) - 1], ids=["one-more", "2^40", "2^64-1"])
def test_a_header_beyond_the_body_is_refused(length: int) -> None:
    """Guards: a slice that silently ends with the body."""
    with pytest.raises(WireError, match=f"is {length}, but the body has 10 bytes") as caught:
        wire.header_length(str(length), 10)
    assert (caught.value.code, caught.value.expected, caught.value.got) == ("frame_invalid", "<= 10", length)


def test_a_json_part_above_its_limit_is_refused_unread() -> None:
    """Guards: a JSON tensor that takes seconds to parse, within a limit that is made for binary ones."""
    with pytest.raises(
        WireError, match="has 101 bytes, the limit is 100; send the tensor as binary"
    ) as caught:
        wire.decode_request(b"[" * 101, None, Limits(json_bytes=100))
    assert (caught.value.code, caught.value.status) == ("json_too_large", 413)
    with pytest.raises(WireError) as caught:
        wire.decode_request(bytes(1000), 100, Limits(json_bytes=100))
    assert caught.value.code == "json_invalid"


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(plain(name="x" * 10**6, shape=[2]), id="name"),
        pytest.param(plain(name="\U0001f600" * 10**5, shape=[2]), id="name-escaped"),
        pytest.param(plain(datatype="x" * 10**6), id="datatype"),
        pytest.param(plain(data=["x" * 10**6]), id="data"),
        pytest.param(size("x" * 10**6), id="size"),
        pytest.param(size(int("9" * 4000)), id="size-of-digits"),
        pytest.param(binary(shape=["x" * 10**6]), id="shape"),
        pytest.param(binary(shape=[1] * 10**5), id="rank"),
        pytest.param(request(parameters={"x" * 10**6: None}), id="parameter"),
        pytest.param(text('{"' + '":1,"'.join(["x" * 10**6] * 2) + '":2}'), id="key-twice"),
        pytest.param(request(outputs=[{"name": "y" * 10**6}] * 2), id="output-twice"),
    ],
)
def test_an_error_is_short_whatever_was_sent(message: Message) -> None:
    """Guards: megabytes of a sender's own text in the answer and in the log."""
    body, length = message
    with pytest.raises(WireError) as caught:
        wire.decode_request(body, length)
    assert len(str(caught.value)) < 800
    assert len(repr(caught.value.got)) < 200


@pytest.mark.parametrize(
    ("document", "words"),
    [
        pytest.param({"outputs": []}, "'model_name' of the response is missing", id="no-model-name"),
        pytest.param({"model_name": "a"}, "'outputs' is missing or null", id="no-outputs"),
        pytest.param(
            {"model_name": "a", "model_version": 1, "outputs": []}, "is a number", id="version-number"
        ),
    ],
)
def test_a_response_that_breaks_the_protocol_is_refused(document: dict[str, Any], words: str) -> None:
    """Guards: a KeyError in the client for the answer of some other server."""
    with pytest.raises(WireError, match=words) as caught:
        wire.decode_response(json.dumps(document).encode(), None)
    assert caught.value.code == "request_invalid"
