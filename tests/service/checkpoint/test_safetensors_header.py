"""The header of the container: what is read, and every way of getting it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from gemmwire_service.checkpoint.safetensors_header import (
    DTYPE_BITS,
    HEADER_LIMIT,
    PREFIX,
    TensorInfo,
    header_length,
    parse_header,
)
from gemmwire_service.errors import CheckpointError
from safetensors_bytes import container, entry, frame

F32_1 = entry("F32", [1], 0, 4)


def reference(blob: bytes) -> dict[str, tuple[str, list[int]]]:
    """What the reference reader finds: name -> (dtype, shape)."""
    deserialize: Any = safetensors.deserialize
    return {name: (found["dtype"], found["shape"]) for name, found in deserialize(blob)}


def parse(blob: bytes) -> dict[str, TensorInfo]:
    length = header_length(blob[:PREFIX], len(blob), "a.safetensors")
    return parse_header(blob[PREFIX : PREFIX + length], len(blob) - PREFIX - length, "a.safetensors")


def test_a_golden_file_is_read_as_the_format_says() -> None:
    """Guards: a reader and a writer that agree with each other and not with the format."""
    golden = (
        b'@\x00\x00\x00\x00\x00\x00\x00{"test":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}    '
        b"\x00\x00\x80?\x00\x00\x00@\x00\x00@@\x00\x00\x80@"
    )
    assert save({"test": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}) == golden
    assert parse(golden) == {"test": TensorInfo("test", "F32", (2, 2), 0, 16)}


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    """Guards: ranges compared with neighbours that they do not have. A header may list them in any order."""
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", [2], 4, 8), "a": entry("F32", [], 0, 4)}

    expected = [TensorInfo("a", "F32", (), 0, 4), TensorInfo("b", "BF16", (2,), 4, 4)]
    assert list(parse(frame(header, bytes(8))).values()) == expected


@pytest.mark.parametrize(("dtype", "bits"), DTYPE_BITS.items(), ids=str)
def test_every_dtype_of_the_format_is_known(dtype: str, bits: int) -> None:
    """Guards: a checkpoint refused for a tensor that would have been skipped. 8 elements are whole bytes."""
    blob = container({"t": (dtype, [2, 4], bytes(bits))})

    assert parse(blob)["t"] == TensorInfo("t", dtype, (2, 4), 0, bits)
    assert list(reference(blob)) == ["t"], "the reference reader does not take it"


def test_the_dtypes_are_those_of_the_reference_reader() -> None:
    """Guards: a dtype that a newer release of the format adds. The reference lists its own in an error."""
    with pytest.raises(safetensors.SafetensorError, match="unknown variant") as error:
        reference(frame({"t": entry("?", [1], 0, 4)}, bytes(4)))

    known = str(error.value).partition("expected one of ")[2].partition(" at line")[0]
    assert {name.strip("` ") for name in known.split(",")} == set(DTYPE_BITS)


@pytest.mark.parametrize(
    "blob",
    [
        pytest.param(frame({}), id="no-tensor"),
        pytest.param(container({"t": ("F32", [0, 5], b"")}), id="no-elements"),
        pytest.param(container({"t": ("F32", [1 << 62, 0, 1 << 62], b"")}), id="no-elements-in-2^124"),
        pytest.param(
            frame({"b": entry("U8", [1], 0, 1), "a": entry("U8", [0], 0, 0)}, b"\1"), id="empty-listed-last"
        ),
        pytest.param(container({"t": ("F32", [], bytes(4))}), id="rank-0"),
        pytest.param(
            container({"a": ("U8", [0], b""), "b": ("U8", [1], b"\1"), "c": ("U8", [0], b"")}), id="empties"
        ),
        pytest.param(container({"t": ("F32", [1] * 70, bytes(4))}), id="rank-70"),
        pytest.param(frame({"t": {**F32_1, "comment": "new in some version"}}, bytes(4)), id="further-key"),
    ],
)
def test_odd_but_valid_headers_are_read(blob: bytes) -> None:
    """Guards: strictness beyond the format."""
    assert set(parse(blob)) == set(reference(blob))


ABUSE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven-bytes": (bytes(7), "is truncated: it has 7 bytes"),
    "length-2^40": ((1 << 40).to_bytes(8, "little") + b"{}", "header of 1099511627776 bytes"),
    "length-2^64": (b"\xff" * 8 + b"{}", "header of 18446744073709551615 bytes"),
    "length-over-the-bound": ((HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}", "the bound is 100000000"),
    "length-beyond-the-file": ((3).to_bytes(8, "little") + b"{}", "3 bytes is declared, and 2 bytes follow"),
    "length-0": (frame(b""), "begins with b''"),
    "html": (frame(b"<!doctype html>"), "begins with b'<!doctyp'"),
    "leading-space": (frame(b" {}"), "begins with b' {}'"),
    "array": (frame(b"[]"), "begins with b'[]'"),
    "cut-json": (frame(b'{"t":'), "not valid JSON"),
    "two-objects": (frame(b"{}{}"), "not valid JSON"),
    "not-utf-8": (frame(b'{"\xff":1}'), "not valid JSON"),
    "nan": (frame(b'{"t": NaN}'), "NaN is not JSON"),
    "nested-deeply": (frame(b'{"t":' + b"[" * 200_000), "not valid JSON"),
    "number-of-10000-digits": (
        frame(b'{"t":{"dtype":"U8","shape":[' + b"9" * 10_000 + b"]}}"),
        "a.safetensors: ",
    ),
    "duplicate-tensor": (
        frame(b'{"t":%b,"t":%b}' % ((json.dumps(F32_1).encode(),) * 2), bytes(4)),
        "key 't' is given twice",
    ),
    "duplicate-key": (
        frame(b'{"t":{"dtype":"U8","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "key 'dtype' is given twice",
    ),
    "metadata-number": (frame({"__metadata__": {"a": 1}}), "__metadata__ must map strings"),
    "metadata-list": (frame({"__metadata__": []}), "__metadata__ must map strings"),
    "entry-null": (frame({"t": None}), "tensor 't': its header entry is null"),
    "entry-without-shape": (frame({"t": {"dtype": "F32", "data_offsets": [0, 0]}}), "lacks shape"),
    "dtype-unknown": (
        frame({"t": entry("F99", [1], 0, 4)}, bytes(4)),
        "dtype 'F99' is not one of the format",
    ),
    "dtype-list": (frame({"t": entry(["F32"], [1], 0, 4)}, bytes(4)), "dtype list is not one"),
    "shape-null": (frame({"t": entry("F32", None, 0, 4)}, bytes(4)), "shape is null"),
    "shape-string": (frame({"t": entry("F32", ["\ud800"], 0, 4)}, bytes(4)), r"shape holds '\ud800'"),
    "shape-float": (frame({"t": entry("F32", [1.0], 0, 4)}, bytes(4)), "shape holds 1.0"),
    "shape-true": (frame({"t": entry("F32", [True], 0, 4)}, bytes(4)), "shape holds True"),
    "shape-negative": (frame({"t": entry("F32", [-1, -1], 0, 4)}, bytes(4)), "shape holds -1"),
    "shape-2^63": (frame({"t": entry("F32", [1 << 63], 0, 4)}, bytes(4)), "shape holds 9223372036854775808"),
    "shape-wraps-to-4-bytes": (
        frame({"t": entry("F32", [1 << 62, 4, (1 << 62) + 1], 0, 4)}, bytes(4)),
        "takes",
    ),
    "shape-wraps-to-0": (
        frame({"t": entry("F32", [1 << 32, 1 << 32], 0, 0)}),
        "takes 73786976294838206464 bytes",
    ),
    "shape-of-a-million-2^62": (frame({"t": entry("F32", [1 << 62] * 1_000_000, 0, 4)}, bytes(4)), "takes"),
    "shape-too-small": (
        frame({"t": entry("F32", [2], 0, 12)}, bytes(12)),
        "F32 [2] takes 8 bytes; its data_offsets",
    ),
    "shape-too-large": (
        frame({"t": entry("BF16", [3], 0, 4)}, bytes(4)),
        "BF16 [3] takes 6 bytes; its data_offsets",
    ),
    "half-a-byte": (frame({"t": entry("F4", [3], 0, 2)}, bytes(2)), "takes 1 bytes and 4 bits"),
    "offsets-three": (frame({"t": {**F32_1, "data_offsets": [0, 2, 4]}}, bytes(4)), "is not [begin, end]"),
    "offsets-backwards": (frame({"t": entry("F32", [1], 4, 0)}, bytes(4)), "[4, 0] is not [begin, end]"),
    "offsets-negative": (frame({"t": entry("F32", [1], -4, 0)}, bytes(4)), "data_offsets holds -4"),
    "offsets-2^63": (
        frame({"t": entry("U8", [1], 0, 1 << 63)}, bytes(4)),
        "data_offsets holds 92233720368547758",
    ),
    "truncated": (
        container({"t": ("F32", [2], bytes(8))})[:-1],
        "bytes 0 to 8 run past the end of its 7 bytes",
    ),
    "rest": (
        container({"t": ("F32", [1], bytes(4))}) + b"\0",
        "1 bytes after tensor 't' belong to no tensor",
    ),
    "rest-without-tensors": (frame({}, b"\0"), "1 bytes after the header belong to no tensor"),
    "hole-at-the-beginning": (
        frame({"t": entry("F32", [1], 4, 8)}, bytes(8)),
        "bytes 0 to 4, between the header",
    ),
    "hole": (
        frame({"a": F32_1, "b": entry("F32", [1], 5, 9)}, bytes(9)),
        "bytes 4 to 5, between tensor 'a' and tensor 'b'",
    ),
    "overlap": (
        frame({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)),
        "tensor 'b' begins at byte 4 and tensor 'a' ends at 8",
    ),
    "same-bytes": (frame({"a": F32_1, "b": F32_1}, bytes(4)), "tensors must not overlap"),
    "empty-inside-another": (
        frame({"a": F32_1, "b": entry("F32", [0], 2, 2)}, bytes(4)),
        "tensor 'b' begins at byte 2 and tensor 'a' ends at 4",
    ),
}


@pytest.mark.parametrize(("blob", "says"), ABUSE.values(), ids=ABUSE)
def test_abuse_is_refused_with_its_cause(blob: bytes, says: str) -> None:
    """Guards: a crash, a huge allocation or somebody else's bytes out of a hostile or damaged file."""
    with pytest.raises(CheckpointError) as error:
        parse(blob)

    message = str(error.value)
    assert says in message
    assert message.startswith("a.safetensors: ")
    message.encode()  # a lone surrogate would fail where the message is printed
    assert len(message) < 1000


@pytest.mark.parametrize("name", ["\ud800", "n" * 1_000_000], ids=["surrogate", "a-million-letters"])
def test_a_hostile_name_does_not_reach_the_message_as_it_is(name: str) -> None:
    """Guards: a log line of megabytes, or one that cannot be encoded."""
    with pytest.raises(CheckpointError, match="run past the end") as error:
        parse(frame({name: entry("F32", [1], 0, 8)}, bytes(4)))

    str(error.value).encode()
    assert len(str(error.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.integers(0, 6) | st.sampled_from([-1, 1 << 31, 1 << 62, 1 << 63, 1 << 64]) | st.booleans()
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "F99"]) | JSON,
        "shape": st.lists(SIZES, max_size=4) | JSON,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
    }
)


def consistent(tensors: dict[str, TensorInfo], data_size: int) -> bool:
    """Every byte belongs to exactly one tensor."""
    ends = [0, *(info.start + info.nbytes for info in tensors.values())]
    return [info.start for info in tensors.values()] == ends[:-1] and ends[-1] == data_size


def parse_or_refuse(blob: bytes) -> None:
    """Nothing but a CheckpointError; and what is read, the reference reader reads in the same way."""
    try:
        tensors = parse(blob)
    except CheckpointError:
        return
    data_size = len(blob) - PREFIX - int.from_bytes(blob[:PREFIX], "little")
    assert consistent(tensors, data_size)
    found = {name: (info.dtype, list(info.shape)) for name, info in tensors.items()}
    assert found == reference(blob)


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(blob: bytes) -> None:
    parse_or_refuse(blob)


@settings(derandomize=True, deadline=None)
@given(st.binary(max_size=64))
def test_any_header_is_read_or_refused(header: bytes) -> None:
    parse_or_refuse(frame(header))


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.dictionaries(st.text("abc_.", max_size=3), ENTRIES, max_size=3), st.integers(0, 24))
def test_any_entries_are_read_or_refused(entries: dict[str, Any], data_size: int) -> None:
    parse_or_refuse(frame(entries, bytes(data_size)))


@settings(derandomize=True, deadline=None, max_examples=500)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    """Guards: an exception of another kind one byte away from a good file, where random bytes never get."""
    good = container({"a.weight": ("BF16", [2, 2], bytes(8)), "a.bias": ("F32", [2], bytes(8))})
    position = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.sampled_from([b"", b"\0", b"9", b"-", b'"', b"}", b"]", b"\xff", b"[{", b"1e9"]))

    parse_or_refuse(good[:position] + byte + good[position + 1 :])
